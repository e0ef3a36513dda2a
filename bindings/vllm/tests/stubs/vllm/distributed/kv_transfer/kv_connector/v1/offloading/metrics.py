"""Statistics of the offloading."""

from ..metrics import KVConnectorStats


class OffloadingConnectorStats(KVConnectorStats):
    def increase_counter(self, counter_name, counter_increase_value=1, labelvalues=()):
        at = (counter_name, labelvalues)
        self.data[at] = self.data.get(at, 0) + counter_increase_value

    def set_gauge(self, gauge_name, gauge_value, labelvalues=()):
        self.data[(gauge_name, labelvalues)] = gauge_value

    def is_empty(self):
        return not self.data
