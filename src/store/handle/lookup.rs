//! Lookups of a store. Keys are made before its lock is taken.

use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::device::Device;
use crate::fail;
use crate::format::keys::Key;
use crate::format::keys::chain::Chain;
use crate::format::keys::media::{self, Medium};
use crate::store::handle::Store;
use crate::store::state::lookup::Look;
use crate::store::token_path::MAX_TOKENS;

impl Store {
    /// Its device.
    pub fn device(&self) -> Arc<dyn Device> {
        self.inner.tools.lock().device.clone()
    }

    /// Looks a sequence up in a namespace.
    pub fn lookup(&self, space: u32, tokens: &[u32]) -> Result<Look> {
        self.lookup_media(space, tokens, &[])
    }

    /// The same with media that start in it.
    pub fn lookup_media(&self, space: u32, tokens: &[u32], media: &[Medium]) -> Result<Look> {
        let keys = self.chunk_keys(space, tokens, media)?;
        self.lookup_keys(space, &keys, tokens.len() as u64)
    }

    /// What the full chunks of a sequence are called.
    pub fn chunk_keys(&self, space: u32, tokens: &[u32], media: &[Medium]) -> Result<Vec<Key>> {
        if tokens.len() > MAX_TOKENS {
            fail!(Limit, "a lookup of {} tokens, the limit is {MAX_TOKENS}", tokens.len());
        }
        media::check(media, 0..tokens.len() as u64)?;
        let home = self.look(|core| {
            let key = core.space(space).map(|space| space.key);
            Some((key?, core.table_of(space)?.layout.chunk_tokens()))
        })?;
        let Some((key, each)) = home else { fail!(NotFound, "there is no namespace {space}") };
        let mut keys = Vec::new();
        Chain::new(key, each)?.extend(tokens, &media::extras(media, each)?, &mut keys)?;
        Ok(keys)
    }

    /// Looks up the keys of the full chunks of a sequence of so many tokens.
    pub fn lookup_keys(&self, space: u32, keys: &[Key], tokens: u64) -> Result<Look> {
        self.with(|core| core.lookup_keys(space, keys, tokens).cloned())
    }
}
