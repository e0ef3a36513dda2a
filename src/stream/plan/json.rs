//! A plan for programs.

use crate::base::json_out::Json;
use crate::stream::plan::runs::{HOMES, name_of};
use crate::stream::plan::{Binding, Forecast, Inputs, Mode, Plan, Seat};

impl Plan {
    /// The plan as one JSON object.
    pub fn json(&self, inputs: &Inputs) -> String {
        let mut json = Json::default();
        json.object(|json| {
            json.key("seat").text(if self.seat == Seat::Device { "device" } else { "host" });
            json.key("mode").text(if self.mode == Mode::Ring { "ring" } else { "tiered" });
            json.key("homes").object(|json| self.homes_json(json, inputs));
            json.key("runs").list(|json| self.runs_json(json, inputs));
            for (name, count, bytes) in [
                ("slots", self.slots, self.slot_bytes),
                ("expert_slots", self.expert_slots, self.expert_slot_bytes),
            ] {
                json.key(name).object(|json| {
                    json.key("count").whole(count);
                    json.key("slot_bytes").whole(bytes);
                });
            }
            json.key("staging_bytes").whole(self.staging_bytes);
            json.key("chunk_bytes").whole(self.chunk_bytes);
            json.key("device_bytes").whole(self.device_bytes);
            json.key("host_bytes").whole(self.host_bytes);
            json.key("pinned_bytes").whole(self.pinned_bytes);
            json.key("figures").list(|json| self.figures_json(json));
            json.key("hints").list(|json| self.hints_json(json, inputs));
            json.key("forecast");
            match &self.forecast {
                None => json.null(),
                Some(forecast) => forecast.json(json),
            }
        });
        json.into_text()
    }

    fn homes_json(&self, json: &mut Json, inputs: &Inputs) {
        for (home, name) in HOMES {
            json.key(name).object(|json| {
                let (dense, experts) =
                    (self.count(inputs, home, false), self.count(inputs, home, true));
                json.key("units").whole(dense.units);
                json.key("bytes").whole(dense.bytes);
                json.key("experts").whole(experts.units);
                json.key("expert_bytes").whole(experts.bytes);
            });
        }
    }

    fn runs_json(&self, json: &mut Json, inputs: &Inputs) {
        for run in self.runs(inputs) {
            json.object(|json| {
                json.key("first").whole(run.first as u64);
                json.key("last").whole(run.last as u64);
                json.key("home").text(name_of(run.home));
                json.key("on_processor").flag(run.on_processor);
            });
        }
    }

    fn figures_json(&self, json: &mut Json) {
        for figure in &self.figures {
            json.object(|json| {
                json.key("name").text(figure.name);
                json.key("bytes").whole(figure.bytes);
                json.key("takes").flag(figure.takes);
                json.key("total").flag(figure.total);
                json.key("why").text(&figure.why);
            });
        }
    }

    fn hints_json(&self, json: &mut Json, inputs: &Inputs) {
        for hint in self.processor_hint(inputs) {
            json.object(|json| {
                json.key("unit").whole(hint.unit);
                json.key("in_place_ns").whole(hint.in_place_ns);
                json.key("send_ns").whole(hint.send_ns);
                json.key("in_place").flag(hint.in_place);
            });
        }
    }
}

impl Binding {
    /// What it is called, for programs.
    pub fn name(self) -> &'static str {
        match self {
            Binding::Compute => "compute",
            Binding::Device => "device",
            Binding::Disk => "disk",
        }
    }
}

impl Forecast {
    /// Writes it as an object.
    pub fn json(&self, json: &mut Json) {
        json.object(|json| {
            json.key("pass_ns").whole(self.pass_ns);
            json.key("first_ns").whole(self.first_ns);
            json.key("bound_ns").whole(self.bound_ns);
            json.key("compute_ns").whole(self.compute_ns);
            json.key("device_ns").whole(self.device_ns);
            json.key("disk_ns").whole(self.disk_ns);
            json.key("device_bytes").whole(self.device_bytes);
            json.key("disk_bytes").whole(self.disk_bytes);
            json.key("binding").text(self.binding.name());
            json.key("tokens_per_s").real(self.tokens_per_s());
        });
    }
}
