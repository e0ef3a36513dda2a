//! Forwarding of `Policy` calls to a field that implements them.

/// Writes the listed calls inside an `impl Policy`: `forward!(queues: remove, resize)` forwards
/// both to `self.queues`. The names of the types resolve where the macro is used.
macro_rules! forward {
    ($field:ident: $($call:ident),+) => { $(forward!(@$call $field);)+ };
    (@used_bytes $field:ident) => {
        fn used_bytes(&self, _: &Objects) -> u64 {
            self.$field.used_bytes()
        }
    };
    (@look_ahead $field:ident) => {
        fn look_ahead(&mut self, objects: &Objects) {
            self.$field.look_ahead(objects);
        }
    };
    (@prefetch $field:ident) => {
        fn prefetch(&self, ids: &[u64]) {
            self.$field.prefetch(ids);
        }
    };
    (@miss $field:ident) => {
        fn miss(&mut self, _: &Objects, id: u64, _: i64) {
            self.$field.miss(id);
        }
    };
    (@remove $field:ident) => {
        fn remove(&mut self, objects: &mut Objects, slot: Slot, _: bool, _: i64) {
            self.$field.remove(objects, slot);
        }
    };
    (@victim $field:ident) => {
        fn victim(&mut self, objects: &mut Objects, _: i64) -> Option<Slot> {
            self.$field.victim(objects)
        }
    };
    // For structures that link objects in the order of their eviction.
    (@put_back $field:ident) => {
        fn put_back(&mut self, objects: &mut Objects, slot: Slot, _: i64) {
            self.$field.put_back(objects, slot);
        }

        fn evicts_by_links(&self) -> bool {
            true
        }
    };
    (@put_back_by_rank $field:ident) => {
        fn put_back(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
            let rank = self.rank(objects, slot, now);
            self.$field.update(objects, slot, rank);
        }
    };
    (@resize $field:ident) => {
        fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
            self.$field.resize(objects, slot, units);
        }
    };
    (@set_capacity $field:ident) => {
        fn set_capacity(&mut self, units: u64) {
            self.$field.set_capacity(units);
        }
    };
    (@rank $field:ident) => {
        fn rank(&self, objects: &Objects, slot: Slot, _: i64) -> Rank {
            self.$field.rank(objects, slot)
        }
    };
    (@check $field:ident) => {
        fn check(&self, objects: &Objects) -> Result<()> {
            self.$field.check(objects)
        }
    };
}
