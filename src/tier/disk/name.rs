//! The file that names the store: two copies of one block. If one copy is damaged, it is rewritten
//! from the other.

use crate::base::memory::Buffer;
use crate::base::status::{Error, Result, Status};
use crate::format::segment::{
    BLOCK_BYTES, HeaderError, STORE_BLOCKS, StoreHeader, StoreId, VERSION,
};
use crate::io::files::{Access, FileId, Files, Piece};
use crate::tier::disk::Options;
use crate::tier::disk::files::{STORE, refusal, unfinished};
use crate::tier::disk::staging::Staging;

/// Bytes of the file.
pub(super) const STORE_BYTES: u64 = (STORE_BLOCKS * BLOCK_BYTES) as u64;
const COPY_BYTES: u64 = BLOCK_BYTES as u64;

/// Content and condition of the file.
pub(super) struct Named {
    pub store: StoreId,
    /// Unsound copies.
    pub damaged: u32,
    /// Present length of the file.
    pub bytes: u64,
}

/// Offsets of the copies.
pub(super) fn copies() -> impl Iterator<Item = u64> {
    (0..STORE_BLOCKS as u64).map(|copy| copy * COPY_BYTES)
}

/// The error if no copy is sound.
pub(super) fn unnamed(error: HeaderError) -> Error {
    match error {
        HeaderError::Version(other) => {
            let text = format!("the store is of version {other}, this library reads {VERSION}");
            Error::new(Status::Unsupported, text)
        }
        HeaderError::Damaged => {
            let text = format!(
                "both copies in {STORE} are damaged, so the store cannot be identified. Restore the file \
                 from a backup, or remove the directory to begin with an empty store"
            );
            Error::new(Status::Corrupt, text)
        }
    }
}

/// Creates the file.
pub(super) fn make(files: &dyn Files, staging: &Staging, options: &Options) -> Result<StoreId> {
    let header = StoreHeader { store: options.random, segment_bytes: options.segment_bytes };
    let mut bytes = [0; STORE_BYTES as usize];
    header.encode(&mut bytes);
    let buffer = staging.map(STORE_BYTES)?;
    // SAFETY: a local buffer, as long as the bytes.
    unsafe { buffer.address().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    let draft = unfinished(STORE);
    let file = files.create(&draft, STORE_BYTES).map_err(refusal)?;
    // SAFETY: as above.
    let written = unsafe { transfer(files, file, Access::Write, 0, buffer.address(), STORE_BYTES) };
    let written = written.and_then(|()| files.sync(file));
    files.close(file);
    written.map_err(refusal)?;
    files.rename(&draft, STORE)?;
    files.sync_names()?;
    Ok(options.random)
}

/// Reads the file. A damaged copy is rewritten from the other, if possible.
pub(super) fn read(files: &dyn Files, staging: &Staging) -> Result<Named> {
    let buffer = staging.map(STORE_BYTES)?;
    let file = files.open(STORE)?;
    let named = look(files, file, &buffer);
    files.close(file);
    named
}

fn look(files: &dyn Files, file: FileId, buffer: &Buffer) -> Result<Named> {
    let bytes = files.len(file)?;
    let (mut sound, mut damaged) = (None, Vec::new());
    let (mut error, mut failed) = (HeaderError::Damaged, None);
    for at in copies() {
        // One read for each copy: one may be readable when the other is not.
        let Some(address) = buffer.range(at, COPY_BYTES) else { continue };
        // SAFETY: a local buffer, here and below.
        let read = unsafe { transfer(files, file, Access::Read, at, address, COPY_BYTES) };
        // SAFETY: as above; zeros where nothing was read.
        let block = unsafe { std::slice::from_raw_parts(address, BLOCK_BYTES) };
        // A copy that was not read completely may look sound by chance.
        let decoded = read.map(|()| StoreHeader::decode(block));
        match decoded {
            Ok(Ok(header)) => sound = sound.or(Some((header.store, address))),
            Ok(Err(HeaderError::Damaged)) => damaged.push(at),
            // Another version is no damage: the copy stays.
            Ok(Err(version)) => error = version,
            Err(error) => {
                damaged.push(at);
                // A file that is too short is damaged; another failure of the disk may pass.
                failed = failed.or(Some(error).filter(|_| at + COPY_BYTES <= bytes));
            }
        }
    }
    let Some((store, address)) = sound else {
        return Err(match (error, failed) {
            (HeaderError::Damaged, Some(error)) => error,
            _ => unnamed(error),
        });
    };
    for &at in &damaged {
        // In place: the sound copy is not touched, whatever happens. SAFETY: as above.
        let written = unsafe { transfer(files, file, Access::Write, at, address, COPY_BYTES) };
        match written.and_then(|()| files.sync(file)) {
            Ok(()) => log::warn!("{STORE}: the copy at {at} was damaged and has been rewritten"),
            Err(error) => {
                log::warn!("{STORE}: the copy at {at} is damaged and cannot be rewritten: {error}");
            }
        }
    }
    let bytes = files.len(file).unwrap_or(bytes);
    Ok(Named { store, damaged: damaged.len() as u32, bytes })
}

/// # Safety
/// The memory is valid, and nothing else uses it during the call.
unsafe fn transfer(
    files: &dyn Files,
    file: FileId,
    access: Access,
    offset: u64,
    address: *mut u8,
    bytes: u64,
) -> Result<()> {
    let mut pieces = [Piece::one(file, access, offset, address, bytes)];
    // SAFETY: the caller's guarantee.
    unsafe { files.transfer(&mut pieces) };
    let [piece] = pieces;
    piece.result
}
