//! The C boundary: the committed header and its layout, and random programs over it.
#![cfg(not(feature = "shuttle"))]
#![allow(missing_docs)]

mod header;
mod headers;
mod layout;
mod random;
