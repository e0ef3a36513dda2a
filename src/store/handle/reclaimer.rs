//! Memory that others need more.

use crate::base::budget::{Reclaim, Tier};
use crate::base::sync::{Arc, Mutex, Weak};
use crate::store::handle::{Inner, finish};

/// Gives memory back when others need it.
pub(super) fn reclaimer(slot: &Arc<Mutex<Weak<Inner>>>) -> Reclaim {
    let slot = slot.clone();
    Box::new(move |tier, bytes, _deadline| {
        let inner = slot.lock().upgrade();
        let has = matches!(tier, Tier::Host | Tier::Device);
        let Some(inner) = inner.filter(|_| has) else { return 0 };
        if tier == Tier::Device {
            let mut state = inner.state.lock();
            let promised = state.core.shrink_device(bytes);
            let news = inner.news(&mut state);
            drop(state);
            finish(news);
            return promised;
        }
        // What nobody uses goes first.
        let trimmed = inner.tools.lock().disk.as_ref().map_or(0, |disk| disk.trim());
        if trimmed >= bytes {
            return trimmed;
        }
        let mut state = inner.state.lock();
        let promised = trimmed + state.core.shrink(bytes - trimmed);
        let news = inner.news(&mut state);
        drop(state);
        finish(news);
        promised
    })
}
