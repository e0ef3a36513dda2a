//! The core of a store as its hands and its disk share it, where a test drives them itself.

use kvtier::base::sync::{Arc, Mutex};
use kvtier::kv::core::Core;
use kvtier::kv::core::books::{Books, Page};
use kvtier::tier::disk::{CellAt, Keeper, Spot};

#[derive(Clone)]
pub struct Shared(pub Arc<Mutex<Core>>);

impl Books for Shared {
    fn page(&mut self, from: (u32, u32), page: &mut Page) -> Option<(u32, u32)> {
        self.0.lock().page(from, page)
    }
}

impl Keeper for Shared {
    fn wants(&mut self, cell: &CellAt) -> bool {
        self.0.lock().wants(cell)
    }

    fn moved(&mut self, cell: &CellAt, to: Spot) -> bool {
        self.0.lock().moved(cell, to)
    }

    fn lost(&mut self, cell: &CellAt) -> bool {
        self.0.lock().lost(cell)
    }
}
