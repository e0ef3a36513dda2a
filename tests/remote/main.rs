//! The remote tier: its backends over real servers, and stores that share one.
#![cfg(not(feature = "shuttle"))]
#![allow(missing_docs)]

#[cfg(any(feature = "redis", feature = "s3"))]
mod backends;
#[cfg(any(feature = "redis", feature = "s3"))]
mod clients;
mod events;
mod hung;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "s3")]
mod s3;
mod stores;
mod stores_redis;
mod twins;
