//! A simulated machine: one disk, one link to a device, and the state of a streamer. It records
//! which bytes are where, so that a lease of an incomplete or overwritten unit is detected.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use kvtier::base::status::{Error, Result, Status};
use kvtier::device::Event;
use kvtier::stream::plan::{ComputeLocation, Mode, Plan, Residency};
use kvtier::stream::scheduler::{
    Acquired, CopyJob, CopyProgress, CopySource, Lease, ReadJob, ReadTarget, Scheduler, Setup,
    Target,
};
use kvtier::stream::units::{Extent, NONE, Role, Unit, Units};

pub const MIB: u64 = 1 << 20;

/// Units of one extent each, one behind the other in a file.
pub fn units(sizes: &[(Role, u64)]) -> Units {
    let (mut units, mut offset, mut layer) = (Vec::new(), 0, 0);
    let mut expert = 0;
    for &(role, bytes) in sizes {
        match role {
            Role::Layer => (layer, expert) = (layer + 1, 0),
            Role::Expert => expert += 1,
            _ => {}
        }
        let lead = offset % 4096;
        units.push(Unit {
            name: format!("{role:?} {layer} {expert}"),
            role,
            layer: if layer == 0 { NONE } else { layer - 1 },
            expert: if role == Role::Expert { expert - 1 } else { NONE },
            extents: vec![Extent { file: 0, offset, bytes, at: lead }],
            bytes,
            image_bytes: (lead + bytes).next_multiple_of(4096),
        });
        offset += bytes;
    }
    Units { units, parts: Vec::new() }
}

/// A plan by hand.
pub fn plan(
    units: &Units,
    compute: ComputeLocation,
    residencies: Vec<Residency>,
    slots: u32,
    staging_bytes: u64,
) -> Plan {
    let largest = |expert: bool| {
        let of = units.units.iter().filter(|unit| (unit.role == Role::Expert) == expert);
        of.map(|unit| unit.image_bytes).max().unwrap_or(0)
    };
    Plan {
        compute,
        mode: Mode::Tiered,
        on_processor: vec![false; residencies.len()],
        residencies,
        slots,
        slot_bytes: largest(false),
        expert_slots: 0,
        expert_slots_least: 0,
        expert_slots_step: 1,
        expert_slot_bytes: largest(true),
        staging_bytes,
        chunk_bytes: 8 * MIB,
        device_granularity_bytes: 0,
        device_bytes: 0,
        host_bytes: 0,
        pinned_bytes: 0,
        figures: Vec::new(),
        forecast: None,
    }
}

pub fn setup<'a>(units: &'a Units, plan: &'a Plan) -> Setup<'a> {
    Setup {
        units,
        plan,
        order: None,
        wrap: true,
        in_place: false,
        policy: "fifo",
        expert_policy: "lru",
        pinned_percent: 50,
        marks: 0,
    }
}

/// Where bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Resident(u32),
    Line(u32),
    Expert(u32),
    Staging(u32),
}

fn place(goal: Target, unit: u32) -> Place {
    match goal {
        Target::Resident => Place::Resident(unit),
        Target::Slot(slot) => Place::Line(slot),
        Target::ExpertSlot(slot) => Place::Expert(slot),
    }
}

#[derive(PartialEq)]
enum End {
    Read(ReadJob, Result<()>),
    /// It went to where it belongs, not into staging.
    Landed(ReadJob),
    Copy(CopyJob, Result<()>),
}

/// Result that a read or copy is to have.
pub type Fate = Box<dyn FnMut() -> Result<()>>;

/// The machine.
pub struct World {
    pub core: Scheduler,
    pub now_ns: u64,
    pub disk_bytes_per_s: f64,
    pub link_bytes_per_s: f64,
    pub fate: Fate,
    /// Makes a read so many times as long.
    pub slowness: Box<dyn FnMut() -> f64>,
    /// Whether a chunk that can be read to where it belongs is.
    pub lands: Box<dyn FnMut() -> bool>,
    readers: usize,
    disk_free_ns: u64,
    link_free_ns: u64,
    copying: usize,
    reading: usize,
    ends: BinaryHeap<Reverse<(u64, u64)>>,
    what: BTreeMap<u64, End>,
    count: u64,
    /// Chunks (by offset in the file) of which unit are in a place.
    content: BTreeMap<Place, (u32, Vec<u64>)>,
    used: BTreeMap<Place, u32>,
    chunks: Vec<usize>,
    /// Units have memory only where it was put: whose addresses each place is behind, and
    /// whether one has to wait.
    in_place: bool,
    behind: BTreeMap<Place, u32>,
    pub put_off: Box<dyn FnMut() -> bool>,
}

impl World {
    pub fn new(
        core: Scheduler,
        units: &Units,
        disk_bytes_per_s: f64,
        link_bytes_per_s: f64,
    ) -> World {
        let chunks = units.units.iter().map(|unit| {
            let lead = unit.extents[0].offset % 4096;
            (lead + unit.bytes).div_ceil(8 * MIB) as usize
        });
        World {
            core,
            now_ns: 0,
            disk_bytes_per_s,
            link_bytes_per_s,
            fate: Box::new(|| Ok(())),
            slowness: Box::new(|| 1.0),
            lands: Box::new(|| false),
            readers: 2,
            disk_free_ns: 0,
            link_free_ns: 0,
            copying: 0,
            reading: 0,
            ends: BinaryHeap::new(),
            what: BTreeMap::new(),
            count: 0,
            content: BTreeMap::new(),
            used: BTreeMap::new(),
            chunks: chunks.collect(),
            in_place: false,
            behind: BTreeMap::new(),
            put_off: Box::new(|| false),
        }
    }

    /// The same where units are in place on a device.
    pub fn in_place(self) -> World {
        World { in_place: true, ..self }
    }

    /// Puts memory behind addresses. Whether anything came of it.
    fn back(&mut self) -> bool {
        let mut has_ended = false;
        for job in self.core.take_map_jobs() {
            assert!(self.in_place, "{job:?} where no unit is in place");
            let to = place(job.to, job.unit);
            // A delayed job is asked for again when another job has ended.
            let is_idle = self.reading + self.copying == 0;
            let result = match !is_idle && (self.put_off)() {
                true => Ok(false),
                false => (self.fate)().map(|()| true),
            };
            if result == Ok(true) {
                let gone = |at: &Place, unit: &u32| *at == to || *unit == job.unit;
                for (at, _) in self.behind.iter().filter(|(at, unit)| gone(at, unit)) {
                    assert!(!self.used.contains_key(at), "{at:?} is put elsewhere while used");
                }
                self.behind.retain(|at, unit| !gone(at, unit));
                self.behind.insert(to, job.unit);
                self.content.remove(&to);
            }
            has_ended |= result != Ok(false);
            self.core.note_mapped(&job, result, self.now_ns).expect("sound");
        }
        has_ended
    }

    fn has_memory(&self, at: Place, unit: u32) -> bool {
        !self.in_place || self.behind.get(&at) == Some(&unit)
    }

    fn at(&mut self, time_ns: u64, end: End) {
        self.count += 1;
        self.ends.push(Reverse((time_ns, self.count)));
        self.what.insert(self.count, end);
    }

    fn write(&mut self, to: Place, unit: u32, offset: u64) {
        assert!(!self.used.contains_key(&to), "{to:?} is written while it is used");
        let entry = self.content.entry(to).or_insert((unit, Vec::new()));
        if entry.0 != unit {
            *entry = (unit, Vec::new());
        }
        // A load that failed is tried again, and brings the same.
        if !entry.1.contains(&offset) {
            entry.1.push(offset);
        }
    }

    /// Starts the work that disk and link can do now. Returns whether some of it has ended already.
    fn start(&mut self) -> bool {
        while self.reading < self.readers {
            let Some(read) = self.core.take_read(self.now_ns) else { break };
            self.reading += 1;
            let (mut took, mut landed) = (0, false);
            if let ReadJob::Chunk { unit, chunk, to, .. } = read {
                let slower = (self.slowness)();
                took = (chunk.bytes as f64 / self.disk_bytes_per_s * slower * 1e9) as u64;
                let landing = self.core.direct_target(&read).filter(|(_, after)| after.is_none());
                let to = match (to, landing) {
                    (ReadTarget::Unit(goal), _) => place(goal, unit),
                    (ReadTarget::Staging(_), Some((goal, _))) if (self.lands)() => {
                        landed = true;
                        place(goal, unit)
                    }
                    (ReadTarget::Staging(slot), _) => Place::Staging(slot),
                };
                if matches!(to, Place::Staging(_)) {
                    self.content.remove(&to);
                }
                self.write(to, unit, chunk.offset);
            }
            self.disk_free_ns = self.disk_free_ns.max(self.now_ns) + took;
            let end = if landed { End::Landed(read) } else { End::Read(read, (self.fate)()) };
            self.at(self.disk_free_ns, end);
        }
        let has_ended = self.back();
        while self.copying < 2 {
            let Some(copy) = self.core.take_copy(self.now_ns) else { break };
            self.copying += 1;
            let took = (copy.chunk.bytes as f64 / self.link_bytes_per_s * 1e9) as u64;
            let from = match copy.from {
                CopySource::Staging(slot) => Place::Staging(slot),
                CopySource::Resident => Place::Resident(copy.unit),
            };
            let (unit, there) = &self.content[&from];
            assert!(*unit == copy.unit && there.contains(&copy.chunk.offset), "copied too early");
            let to = place(copy.to, copy.unit);
            assert!(self.has_memory(to, copy.unit), "{copy:?} has no target memory");
            self.write(to, copy.unit, copy.chunk.offset);
            self.link_free_ns = self.link_free_ns.max(self.now_ns) + took;
            let event = Event(self.count);
            self.core.copied(&copy, CopyProgress::Issued(event), self.now_ns).expect("sound");
            let result = (self.fate)();
            self.at(self.link_free_ns, End::Copy(copy, result));
        }
        has_ended
    }

    /// Lets the next thing end; false when nothing is under way.
    pub fn step(&mut self, until_ns: u64) -> bool {
        let has_ended = self.start();
        let Some(&Reverse((time_ns, id))) = self.ends.peek() else { return has_ended };
        if time_ns > until_ns {
            return false;
        }
        self.ends.pop();
        self.now_ns = self.now_ns.max(time_ns);
        match self.what.remove(&id).expect("an end") {
            End::Read(read, result) => {
                self.reading -= 1;
                if let (ReadJob::Chunk { unit, to: ReadTarget::Unit(goal), .. }, Err(_)) =
                    (&read, &result)
                {
                    self.content.remove(&place(*goal, *unit));
                }
                if let ReadJob::Clear { unit, .. } = read {
                    let keep = |at: &Place| matches!(at, Place::Staging(_) | Place::Resident(_));
                    self.content.retain(|at, (of, _)| keep(at) || *of != unit);
                    assert!(!self.used.keys().any(|at| !self.content.contains_key(at)), "cleared");
                }
                self.core.read_done(&read, result, self.now_ns).expect("sound");
            }
            End::Landed(read) => {
                self.reading -= 1;
                self.core.direct_read_done(&read, self.now_ns).expect("sound");
            }
            End::Copy(copy, result) => {
                self.copying -= 1;
                let to = place(copy.to, copy.unit);
                if let (Some((_, there)), Err(_)) = (self.content.get_mut(&to), &result) {
                    there.retain(|offset| *offset != copy.chunk.offset);
                }
                self.core.copied(&copy, CopyProgress::Done(result), self.now_ns).expect("sound");
            }
        }
        true
    }

    /// Lets time pass.
    pub fn pass(&mut self, ns: u64) {
        let until = self.now_ns + ns;
        while self.step(until) {}
        self.now_ns = until;
    }

    /// Lets everything end that is under way.
    pub fn settle(&mut self) {
        while self.step(u64::MAX) {}
    }

    /// Waits for a unit.
    pub fn acquire(&mut self, unit: u32) -> Result<Lease> {
        let limit = self.count + 200_000;
        loop {
            assert!(self.count < limit, "unit {unit} does not come");
            match self.core.acquire(unit, false, self.now_ns)? {
                Acquired::Ready(lease) => {
                    let at = place(lease.location, unit);
                    let (of, there) = self.content.get(&at).expect("a place with content");
                    assert!(*of == unit, "unit {unit} was asked for, unit {of} was found");
                    assert!(there.len() == self.chunks[unit as usize], "unit {unit} is in pieces");
                    let is_on_device = self.in_place && !self.core.is_on_processor(unit);
                    assert!(!is_on_device || self.has_memory(at, unit), "unit {unit} has none");
                    *self.used.entry(at).or_insert(0) += 1;
                    return Ok(lease);
                }
                Acquired::Wait(_) => {
                    if !self.step(u64::MAX) {
                        return Err(Error::new(Status::Timeout, "nothing is under way"));
                    }
                }
            }
        }
    }

    /// There are to be so many slots for experts.
    pub fn set_expert_slots(&mut self, count: u32) {
        self.core.set_expert_slots(count, self.now_ns).expect("sound");
    }

    /// Removes the memory of expert slots that are no longer needed. Returns how many remain.
    pub fn empty_expert_slots(&mut self) -> u32 {
        let in_use = self.core.empty_expert_slots().expect("sound");
        for slot in in_use..self.core.max_expert_slots() {
            let at = Place::Expert(slot);
            assert!(!self.used.contains_key(&at), "{at:?} is taken away while it is used");
            self.content.remove(&at);
            self.behind.remove(&at);
            self.core.take_dirty(slot);
        }
        in_use
    }

    /// The memory of a unit's home is used for something else.
    pub fn forget_home(&mut self, unit: u32) {
        self.content.remove(&Place::Resident(unit));
    }

    pub fn release(&mut self, lease: &Lease) {
        self.release_after(lease, None);
    }

    pub fn release_after(&mut self, lease: &Lease, after: Option<Event>) {
        let at = place(lease.location, lease.unit);
        let users = self.used.get_mut(&at).expect("a place in use");
        *users -= 1;
        if *users == 0 {
            self.used.remove(&at);
        }
        self.core.release(lease, after, self.now_ns).expect("a lease");
    }

    /// A pass in order: each unit is computed for so long. How long all took.
    pub fn run(&mut self, order: &[u32], compute_ns: u64) -> u64 {
        let since = self.now_ns;
        self.core.pass_begin(self.now_ns).expect("sound");
        for &unit in order {
            let lease = self.acquire(unit).expect("a unit");
            self.pass(compute_ns);
            self.release(&lease);
        }
        self.core.pass_end(self.now_ns).expect("sound");
        self.now_ns - since
    }
}
