"""Stubs of SGLang: the interfaces that kvtier_sglang uses, with their names, parameters and
defaults. tests/engine/test_stubs.py compares them with the installed SGLang."""
