"""Stand-in for lmdeploy: only the parts that the connector uses."""
