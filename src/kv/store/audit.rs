//! An audit of the cells of a store that are in device memory.

use crate::base::status::Result;
use crate::device::Stream;
use crate::kv::core::audit::Audited;
use crate::kv::store::Store;

impl Store {
    /// Reads all cells in device memory back, and holds them against what the store has
    /// elsewhere. What is wrong is forgotten.
    pub fn audit_device(&self) -> Result<Audited> {
        let all = self.with(|core| Ok(core.begin_audit()))?;
        let tools = self.inner.tools.lock().clone();
        let mut audited = Audited::default();
        for one in all {
            // SAFETY: the audit is ended below.
            let found = unsafe { tools.audit(&one, Stream(0)) };
            let mut state = self.inner.state.lock();
            state.core.end_audit(one, found, &mut audited);
            let news = self.inner.news(&mut state);
            drop(state);
            super::finish(news);
        }
        Ok(audited)
    }
}
