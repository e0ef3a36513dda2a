"""A proxy before a stock llama-server that gives its slots a KV tier on disk.

    python -m kvtier_front --server http://127.0.0.1:8080 --slots /var/kv --budget 8G

llama-server must be started with `--slot-save-path /var/kv/`; each of its slots holds the state of one
conversation. The proxy sends a request to the slot that has the longest prefix of its prompt. If a saved
state has a longer one, the proxy restores it first. After the request it saves the slot. It needs the
standard library only.
"""
