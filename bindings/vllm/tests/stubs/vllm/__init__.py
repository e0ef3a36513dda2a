"""Stubs of vLLM: the interfaces that kvtier_vllm implements, with their names, parameters and
defaults. tests/engine/test_stubs.py compares them with the installed vLLM."""

__version__ = "0.33.0"
