"""Statistics of connectors."""

from dataclasses import dataclass, field


@dataclass
class KVConnectorStats:
    data: dict = field(default_factory=dict)

    def to_dict(self):
        return self.data

    def reset(self):
        raise NotImplementedError

    def aggregate(self, other):
        raise NotImplementedError

    def reduce(self):
        raise NotImplementedError

    def is_empty(self):
        raise NotImplementedError
