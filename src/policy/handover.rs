//! From one policy to the next while objects stay.

use crate::base::status::Result;
use crate::fail;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::Policy;

/// Uses of an object that the next policy is told of: those count in every
/// policy that counts, and more would make the telling long.
const USES: u16 = 3;

/// Tells `next` of all objects in the order in which they were used last, each
/// with its uses since it came. The policy before is not asked any more.
pub fn hand_over(objects: &mut Objects, next: &mut dyn Policy, now: i64) -> Result<()> {
    let mut order: Vec<(i64, Slot)> = Vec::new();
    if order.try_reserve_exact(objects.len()).is_err() {
        fail!(NoMem, "no memory to sort {} objects", objects.len());
    }
    order.extend(objects.slots().map(|slot| (objects.node(slot).stamp, slot)));
    order.sort_unstable();
    // Queues that move objects while they search give stamps ahead of the time.
    let mut most = now;
    for (stamp, _) in order.iter_mut().rev() {
        *stamp = (*stamp).min(most);
        most = *stamp - 1;
    }
    for (stamp, slot) in order {
        let node = objects.node_mut(slot);
        let uses = node.hits.min(USES);
        node.tag = 0;
        node.set_freq(0);
        node.set_held(false);
        next.insert(objects, slot, stamp);
        (0..uses).for_each(|_| next.touch(objects, slot, stamp));
    }
    Ok(())
}
