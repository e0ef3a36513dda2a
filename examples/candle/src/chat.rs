//! The engine: restores the KV of a prompt, computes the rest, generates, and stores the KV.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use candle_core::Tensor;
use kvtier::api::{Identity, Level, Namespace, Session, Store};

use crate::cache::KvCache;
use crate::llama::{Config, Llama, greedy};

/// Tokens of a chunk, the unit in which KV is stored. Prompts are computed in blocks that end at its
/// multiples. Each block then has the same shape with and without a store, and so exactly the same
/// numbers.
pub const CHUNK: usize = 128;

/// A store, opened for one model.
pub struct KvStore {
    store: Store,
    space: Namespace,
    /// The level that a put waits for.
    level: Level,
}

impl KvStore {
    /// Opens the store in a folder. `digest` tells the model from others.
    pub fn open(folder: &Path, config: &Config, digest: &[u8], level: Level) -> Result<KvStore> {
        let path = serde_json::to_string(folder)?; // in quotes, as specs have it
        let spec = format!("store(host=1GiB, disk=disk(path={path}, bytes=8GiB))");
        let store = Store::open(&spec)?;
        let model = Identity {
            model: Some(b"llama"),
            weights: Some(digest),
            // KV depends on how it was computed: another program must not find it.
            recipe: Some(b"candle-example(version=1)"),
            ..Identity::default()
        };
        let space = store.namespace(&model, &KvCache::store_layout(config, CHUNK)?)?;
        Ok(KvStore { store, space, level })
    }

    /// Writes what is in memory only.
    pub fn close(self) -> Result<()> {
        Ok(self.store.close()?)
    }
}

/// The results and times of a run.
#[derive(Debug)]
pub struct Run {
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose KV came from the store.
    pub restored_tokens: usize,
    /// From the start to the first token, all of the following included.
    pub first_token: Duration,
    pub restore: Duration,
    pub prefill: Duration,
    /// Logits after the prompt.
    pub logits: Tensor,
    /// Generated tokens.
    pub tokens: Vec<u32>,
}

/// Continues a prompt by at most `most` tokens. Calls `on_token` for each token, and `on_stored` with
/// the number of stored tokens when the KV of the prompt is stored.
pub fn run(
    model: &Llama,
    store: Option<&KvStore>,
    prompt: &[u32],
    most: usize,
    mut on_token: impl FnMut(u32),
    on_stored: impl FnOnce(usize),
) -> Result<Run> {
    let Some(last) = prompt.len().checked_sub(1) else { bail!("the prompt is empty") };
    let began = Instant::now();
    let mut cache = KvCache::new(&model.config, prompt.len() + most)?;
    let mut session = store.map(|store| store.space.session()).transpose()?;
    if let Some(session) = &mut session {
        session.append(prompt)?;
        restore(session, &mut cache, last)?;
    }
    let (restored_tokens, restore) = (cache.tokens(), began.elapsed());
    let logits = prefill(model, &mut cache, prompt)?;
    let mut token = greedy(&logits)?;
    let first_token = began.elapsed();
    on_token(token);
    let mut writer = Writer { store, session, tokens: restored_tokens };
    on_stored(writer.store_chunks(&cache)?);
    let mut tokens = vec![token];
    while tokens.len() < most && !model.config.ends_with(token) {
        token = greedy(&model.forward(&[token], &mut cache)?)?;
        tokens.push(token);
        on_token(token);
    }
    if let Some(session) = &mut writer.session {
        // The KV of the last token was not computed.
        session.append(&tokens[..tokens.len() - 1])?;
    }
    writer.store_chunks(&cache)?;
    let prefill = first_token - restore;
    let prompt_tokens = prompt.len();
    Ok(Run { prompt_tokens, restored_tokens, first_token, restore, prefill, logits, tokens })
}

/// Loads the KV of whole chunks before `last`, the token that must be computed for its logits.
fn restore(session: &Session, cache: &mut KvCache, last: usize) -> Result<()> {
    let whole = |tokens: usize| tokens.min(last) / CHUNK * CHUNK;
    let stored = whole(session.reusable_tokens()? as usize);
    if stored > 0 {
        // Damaged KV counts as missing: the get returns fewer tokens.
        let got = whole(cache.get(session, stored)? as usize);
        cache.set_tokens(got);
    }
    Ok(())
}

/// Computes what the cache lacks of a prompt.
fn prefill(model: &Llama, cache: &mut KvCache, prompt: &[u32]) -> candle_core::Result<Tensor> {
    loop {
        let start = cache.tokens();
        let end = (start / CHUNK * CHUNK + CHUNK).min(prompt.len());
        let logits = model.forward(&prompt[start..end], cache)?;
        if end == prompt.len() {
            return Ok(logits);
        }
    }
}

/// Stores the KV of whole chunks as it is computed.
struct Writer<'a> {
    store: Option<&'a KvStore>,
    session: Option<Session>,
    /// Tokens whose KV is stored.
    tokens: usize,
}

impl Writer<'_> {
    /// Stores all whole chunks of the cache; returns the number of tokens whose KV is stored.
    fn store_chunks(&mut self, cache: &KvCache) -> Result<usize> {
        let end = cache.tokens() / CHUNK * CHUNK;
        if let (Some(store), Some(session)) = (self.store, &self.session)
            && end > self.tokens
        {
            cache.put(session, self.tokens..end, store.level)?;
            self.tokens = end;
        }
        Ok(self.tokens)
    }
}
