//! An audit of the cells of a store that are in device memory.

use crate::base::status::Result;
use crate::device::Stream;
use crate::store::handle::Store;
use crate::store::state::audit::Audited;

/// So many are looked at together: they cannot leave meanwhile.
const TURN: usize = 64;

impl Store {
    /// Reads all cells in device memory back, and holds them against what the store has
    /// elsewhere. What is wrong is forgotten.
    pub fn audit_device(&self) -> Result<Audited> {
        let list = self.with(|core| Ok(core.audit_list()))?;
        let mut audited = Audited::default();
        for some in list.chunks(TURN) {
            self.audit_some(some, &mut audited)?;
        }
        Ok(audited)
    }

    fn audit_some(&self, list: &[u64], audited: &mut Audited) -> Result<()> {
        // Before the core: a close after a defect waits for nothing that is under way, but for
        // this.
        let _auditing = self.auditing.lock();
        let all = self.with(|core| Ok(core.begin_audit(list)))?;
        let tools = self.inner.tools.lock().clone();
        for one in all {
            // SAFETY: the audit is ended below.
            let found = unsafe { tools.audit(&one, Stream(0)) };
            let mut state = self.inner.state.lock();
            state.core.end_audit(one, found, audited);
            let news = self.inner.news(&mut state);
            drop(state);
            super::finish(news);
        }
        Ok(())
    }
}
