//! Rare behaviour of drivers, engines and callers: memory that is registered in parts, drivers that
//! block or do not answer, engines that lose their device during a wait, and devices that are
//! closed while in use.

mod cuda;
mod ends;
mod foreign;
