"""A front before a stock llama-server that gives its slots a KV tier on disk.

    python -m kvtier_front --server http://127.0.0.1:8080 --slots /var/kv --budget 8G

llama-server, started with `--slot-save-path /var/kv/`, keeps the state of one conversation in each slot.
The front sends a request to the slot that knows most of its prompt, fetches a saved state where that
knows more, and saves the slot after the request. Standard library alone.
"""
