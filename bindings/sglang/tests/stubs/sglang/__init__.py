"""SGLang's interface as far as kvtier_sglang touches it: names, parameters and defaults of the
installed version, which tests/engine/test_stubs.py compares. What it does is ours."""
