"""A stand-in: the parts of lmdeploy that the connector is written against."""
