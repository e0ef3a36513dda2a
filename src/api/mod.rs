//! The interface for engines in Rust: open a store, describe the model's KV, put and get the KV of
//! token sequences.
//!
//! It is safe and as small as possible. Other public modules are internals of the library: they may
//! change in any release. This one is checked by the same rules as the C header.
//!
//! | type | what it is |
//! |---|---|
//! | [`Store`] | keeps KV in host memory, on disk, at a remote; opened from a [spec string] |
//! | [`Layout`], [`Group`], [`Dtype`] | the bytes that each layer of the model keeps of a token |
//! | [`Identity`] | what KV depends on beside its tokens: the weights above all |
//! | [`Namespace`] | one model in a store; its sessions share the KV of common prefixes |
//! | [`Session`] | one sequence of tokens, whose KV is put and got |
//! | [`Scope`], [`Transfer`] | transfers that run while the engine computes |
//! | [`Error`], [`Status`] | what failed, with a message that says what to do |
//!
//! KV is named by the model and by all tokens up to it. An engine therefore needs no names of its
//! own: a session with the same first tokens as an earlier one finds the KV of the earlier one, also
//! after a restart. The unit of sharing is a chunk of [`Layout::chunk_tokens`] tokens.
//!
//! ```
//! use kvtier::api::{Dtype, Group, Identity, Layer, Layout, Level, Session, Source, Store, Target};
//!
//! # fn main() -> kvtier::api::Result<()> {
//! # let folder = std::env::temp_dir().join(format!("kvtier-doc-api-{}", std::process::id()));
//! # let folder = folder.display();
//! // Two layers with one KV head of 4 numbers; chunks of 16 tokens.
//! let layout = Layout::new(16, vec![Group::gqa(0..2, 1, 4, Dtype::F32)?])?;
//! let model = Identity { weights: Some(b"digest of the weights"), ..Identity::default() };
//! let tokens: Vec<u32> = (0..40).collect();
//! let bytes = 40 * 4 * size_of::<f32>();
//!
//! // The first process computes the KV of a prompt, and keeps it.
//! let spec = format!(r#"store(host=16MiB, disk=disk(path="{folder}", bytes=64MiB))"#);
//! let store = Store::open(&spec)?;
//! let mut session = store.namespace(&model, &layout)?.session()?;
//! session.append(&tokens)?;
//! let computed = vec![7u8; bytes]; // K and V of each layer
//! let planes = [0, 1].map(|_layer| Layer::kv(&computed[..], &computed[..]));
//! session.put(0..40, 0, planes, Level::Ram)?;
//! store.close()?; // writes what is in memory only
//!
//! // The next process continues the conversation.
//! let store = Store::open(&spec)?;
//! let mut session = store.namespace(&model, &layout)?.session()?;
//! session.append(&tokens)?;
//! let stored = session.reusable_tokens()?;
//! assert_eq!(stored, 32); // the last 8 tokens fill no chunk: compute them
//! let mut layers = vec![[vec![0u8; bytes], vec![0u8; bytes]]; 2];
//! let planes = layers.iter_mut().map(|[k, v]| Layer::kv(&mut k[..], &mut v[..]));
//! let got = session.get(0..stored, 0, planes)?;
//! assert_eq!(got.tokens, 32);
//! assert_eq!(layers[1][0][..32 * 16], computed[..32 * 16]);
//! # drop(session);
//! # store.close()?;
//! # std::fs::remove_dir_all(folder.to_string()).expect("the store's folder");
//! # Ok(())
//! # }
//! ```
//!
//! [spec string]: https://kvtier.github.io/reference/specs.html
//!
//! # Memory
//!
//! Transfers read and write the engine's memory in other threads. A call cannot return, and a
//! [`Scope`] cannot end, before these threads are done with it. Borrows of [`Source`] and [`Target`]
//! last as long, so safe code cannot free, move or read memory that is being written:
//!
//! ```compile_fail
//! # use kvtier::api::{Layer, Result, Session, Target};
//! fn read_too_early(session: &Session, memory: &mut [u8]) -> Result<u8> {
//!     session.scope(|scope| {
//!         let transfer = scope.get(0..16, 0, [Layer::single(&mut *memory)])?;
//!         let byte = memory[0]; // error: `memory` is still borrowed
//!         transfer.wait()?;
//!         Ok(byte)
//!     })
//! }
//! ```
//!
//! ```compile_fail
//! # use kvtier::api::{Layer, Result, Session};
//! fn free_too_early(session: &Session) -> Result<()> {
//!     session.scope(|scope| {
//!         let mut memory = vec![0; 1024];
//!         scope.get(0..16, 0, [Layer::single(&mut memory[..])])?; // error: does not live long enough
//!         Ok(())
//!     })
//! }
//! ```

/// The manual's page, whose programs are compiled as tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/start/rust.md")]
mod manual {}

mod planes;
mod scope;
mod session;
mod store;

pub use crate::base::status::{Error, Result, Status};
pub use crate::format::keys::identity::{Extra, Identity, Shard};
pub use crate::meta::dtype::Dtype;
pub use crate::meta::layout::{Group, Layout, Rule};
pub use crate::store::counters::StoreStats;
pub use crate::store::state::{Level, SessionOpts};
pub use planes::{Layer, Source, Strides, Target};
pub use scope::{Moved, Scope, Transfer};
pub use session::Session;
pub use store::{Namespace, Store};
