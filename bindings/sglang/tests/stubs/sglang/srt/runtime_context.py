"""The parallelism and the model of a rank."""

from types import SimpleNamespace


def get_parallel():
    return SimpleNamespace(tp_size=1, attn_dp_rank=0)


def get_model():
    return SimpleNamespace(model_path="some/model")
