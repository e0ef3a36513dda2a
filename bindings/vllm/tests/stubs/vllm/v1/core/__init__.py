"""Part of the stubs of vLLM; see the package root."""
