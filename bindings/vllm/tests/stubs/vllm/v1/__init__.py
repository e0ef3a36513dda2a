"""Part of a miniature of vLLM: the interfaces that kvtier_vllm implements."""
