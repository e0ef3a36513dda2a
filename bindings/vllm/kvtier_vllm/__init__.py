"""kvtier for vLLM: classes that vLLM loads by module path. See the package's README.

The classes are `kvtier_vllm.tier.KvtierTier`, `kvtier_vllm.policy.KvtierPolicy`,
`kvtier_vllm.spec.KvtierSpec` and `kvtier_vllm.connector.KvtierConnector`. This module itself
does not import vLLM.
"""
