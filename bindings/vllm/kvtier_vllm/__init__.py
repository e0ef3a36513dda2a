"""kvtier in vLLM: classes that vLLM loads by module path. See the package's README.

`kvtier_vllm.tier.KvtierTier`, `kvtier_vllm.policy`, `kvtier_vllm.spec.KvtierSpec` and
`kvtier_vllm.connector.KvtierConnector`. Nothing of vLLM is imported by this module.
"""
