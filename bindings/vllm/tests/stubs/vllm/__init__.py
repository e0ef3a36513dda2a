"""A miniature of vLLM: the interfaces that kvtier_vllm implements, by their names, parameters and
defaults. A test of the opt-in suite compares them with the installed engine's."""

__version__ = "0.33.0"
