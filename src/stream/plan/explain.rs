//! What a plan takes of its budgets, in figures.

use crate::stream::plan::make::Maker;
use crate::stream::plan::runs::Count;
use crate::stream::plan::show::size;
use crate::stream::plan::{Figure, Home, Plan, Seat};
use crate::stream::units::Role;

/// Figures that take from a budget.
struct Taken {
    figures: Vec<Figure>,
    left: u64,
}

impl Taken {
    fn take(&mut self, name: &'static str, bytes: u64, why: String) {
        if bytes > 0 {
            self.figures.push(Figure { name, bytes, takes: true, total: false, why });
            self.left = self.left.saturating_sub(bytes);
        }
    }

    fn end(mut self, name: &'static str) -> Vec<Figure> {
        let why = "nothing fits there any more".to_string();
        self.figures.push(Figure { name, bytes: self.left, takes: false, total: true, why });
        self.figures
    }
}

impl Maker<'_> {
    /// Writes down what the plan takes: of the device after its budget, then of the host.
    pub(super) fn explain(&self, plan: &mut Plan) {
        let all = &self.budgets.figures;
        let host = all.iter().position(|figure| figure.name == "host free").unwrap_or(0);
        let mut figures = all[..host].to_vec();
        let floor = plan.floor(self.inputs.units);
        if plan.seat == Seat::Device {
            figures.append(&mut self.device_figures(plan));
            figures.extend(self.floor("device floor", floor.device_bytes, plan));
        }
        figures.extend_from_slice(&all[host..]);
        figures.append(&mut self.host_figures(plan));
        figures.extend(self.floor("host floor", floor.host_bytes, plan));
        let pageable = plan.host_bytes.saturating_sub(plan.pinned_bytes);
        if plan.seat == Seat::Device && pageable > 0 {
            let why = "of it, beyond the quota for locked memory: copies from there are slower";
            let (name, why) = ("pageable", why.to_string());
            figures.push(Figure { name, bytes: pageable, takes: false, total: false, why });
        }
        plan.figures = figures;
    }

    fn device_figures(&self, plan: &Plan) -> Vec<Figure> {
        let mut taken = Taken { figures: Vec::new(), left: self.budgets.device_bytes };
        let Count { units, bytes } = self.homes(plan, Home::Device, false);
        taken.take("device residents", bytes, format!("{units} units stay on the device"));
        let Count { units, bytes } = self.homes(plan, Home::Device, true);
        let all = if units == self.experts.count { "all " } else { "" };
        taken.take("device experts", bytes, format!("{all}{units} experts stay on the device"));
        self.slots(plan, &mut taken);
        let mut figures = taken.end("device left");
        figures.extend(self.lost_to_grains(plan));
        figures
    }

    /// What units in place take of the device beyond what they have.
    fn lost_to_grains(&self, plan: &Plan) -> Option<Figure> {
        let grain = plan.device_grain_bytes;
        let units = self.inputs.units.units.iter().zip(&plan.homes);
        let homes = units
            .filter(|(_, home)| **home == Home::Device)
            .map(|(unit, _)| plan.taken_by(unit.image_bytes, Home::Device) - unit.image_bytes);
        let bytes = homes.sum();
        let why = format!(
            "of the units that stay, lost: in place each takes whole pieces of {}, and no two \
             share one",
            size(grain)
        );
        (grain > 0).then_some(Figure {
            name: "device grains",
            bytes,
            takes: false,
            total: false,
            why,
        })
    }

    fn host_figures(&self, plan: &Plan) -> Vec<Figure> {
        let mut taken = Taken { figures: Vec::new(), left: self.budgets.host_bytes };
        let why = "units of the layers that the processor computes";
        taken.take("processor", self.fixed(&self.in_place), why.to_string());
        let why = "only rows are looked up in it: host memory is all it needs";
        taken.take("embedding", self.fixed(&self.looked_up), why.to_string());
        let Count { units, bytes } = self.homes(plan, Home::Host, false);
        taken.take("host residents", bytes, format!("{units} units have their home here"));
        let Count { units, bytes } = self.homes(plan, Home::Host, true);
        taken.take("host experts", bytes, format!("{units} experts have their home here"));
        if plan.seat == Seat::Host {
            self.slots(plan, &mut taken);
        }
        let chunk = size(plan.chunk_bytes);
        let why = format!("for reads on their way to the device, in chunks of {chunk}");
        taken.take("staging", plan.staging_bytes, why);
        taken.end("host left")
    }

    /// Units with that home, without those that are there whatever happens.
    fn homes(&self, plan: &Plan, home: Home, experts: bool) -> Count {
        let units = self.inputs.units.units.iter().enumerate();
        let these = units.filter(|(i, unit)| {
            let fixed = self.in_place[*i] || self.looked_up[*i];
            !fixed && plan.homes[*i] == home && (unit.role == Role::Expert) == experts
        });
        these.fold(Count::default(), |count, (_, unit)| Count {
            units: count.units + 1,
            bytes: count.bytes + plan.taken_by(unit.image_bytes, home),
        })
    }

    fn fixed(&self, which: &[bool]) -> u64 {
        let units = self.inputs.units.units.iter().zip(which);
        units.filter(|(_, yes)| **yes).map(|(unit, _)| unit.image_bytes).sum()
    }
    fn slots(&self, plan: &Plan, taken: &mut Taken) {
        let is_lean = self.inputs.wishes.is_lean();
        for (is_expert, name, largest) in [
            (false, "slots", "the largest unit that passes through"),
            (true, "expert slots", "the largest expert"),
        ] {
            let (count, bytes) = match is_expert {
                false => (plan.slots, plan.slot_bytes),
                true => (plan.expert_slots, plan.expert_slot_bytes),
            };
            let why = match is_lean {
                false => largest,
                true if self.all_stay(plan, is_expert) => {
                    "kept though all have room, so that memory can be given back"
                }
                true if is_expert => largest,
                true => "the size that lets most memory be given back",
            };
            let why = format!("{count} x {}, {why}", size(bytes));
            taken.take(name, u64::from(count) * bytes, why);
        }
    }

    /// Whether all of these have their home where they are used.
    fn all_stay(&self, plan: &Plan, experts: bool) -> bool {
        let here = if plan.seat == Seat::Device { Home::Device } else { Home::Host };
        let items = if experts { &self.expert_items } else { &self.items };
        items.iter().all(|item| plan.homes[item.unit] == here)
    }

    /// How little it can be made to take, where memory is to be given back.
    fn floor(&self, name: &'static str, bytes: u64, plan: &Plan) -> Option<Figure> {
        let why = match name {
            _ if !self.inputs.wishes.is_lean() => return None,
            "host floor" if plan.seat == Seat::Device => {
                "what it can shrink to while it is used: staging, and what is used there"
            }
            _ if plan.slots + plan.expert_slots == 0 => {
                "all of it: slots would take no less than units that leave"
            }
            _ => "what it can shrink to while it is used: slots, and what is too large for them",
        };
        let why = why.to_string();
        Some(Figure { name, bytes, takes: false, total: false, why })
    }
}
