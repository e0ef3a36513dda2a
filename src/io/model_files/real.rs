//! Model files on a real file system: O_DIRECT and io_uring where both work, and logged fallbacks
//! where one does not.

use std::path::PathBuf;

use crate::base::fork;
use crate::base::memory::{AllocationRequest, Buffer};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::io::engine::Engine;
use crate::io::files::{FileId, Piece};
use crate::io::model_files::file::ModelFile;
use crate::io::model_files::mapped::Map;
use crate::io::model_files::{
    Descriptor, MAX_MODEL_FILES, ModelFiles, READ_UNIT_BYTES, Stamp, check_piece, zero_past,
};
use crate::io::open_file::OpenFile;

/// Options to open model files.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModelFilesOpts {
    /// Use the page cache, and drop pages after reading.
    pub buffered: bool,
    /// Do not use io_uring.
    pub no_uring: bool,
    /// Transfers in flight of one caller; 0 = the maximum.
    pub depth: u32,
    /// Copy from a memory map. Slow, for comparison only; truncation of a file while it is read
    /// ends the process (SIGBUS).
    pub mapped: bool,
}

/// Open model files.
pub struct RealModelFiles {
    files: Vec<ModelFile>,
    /// A map for each file, if they are mapped.
    maps: Option<Vec<Map>>,
    engine: Engine,
    align: u64,
}

impl RealModelFiles {
    /// Opens files read-only.
    pub fn open(paths: &[PathBuf], opts: &ModelFilesOpts) -> Result<RealModelFiles> {
        fork::arm()?;
        fork::check()?;
        if paths.is_empty() || paths.len() > MAX_MODEL_FILES {
            fail!(Invalid, "{} files of a model: 1 to {MAX_MODEL_FILES} are accepted", paths.len());
        }
        let mut files = Vec::new();
        files.try_reserve_exact(paths.len()).map_err(|_| Status::NoMem)?;
        for path in paths {
            files.push(ModelFile::open(path)?);
        }
        let mut reasons = Vec::new();
        let mut align = 1;
        if !opts.buffered && !opts.mapped {
            match all_direct(&files) {
                Ok(found) => align = found,
                Err(error) => {
                    files.iter().try_for_each(ModelFile::use_page_cache)?;
                    let why = error.message();
                    reasons.push(format!(
                        "no direct reads, which costs bandwidth and CPU time: {why}"
                    ));
                }
            }
        }
        let maps = opts.mapped.then(|| files.iter().map(Map::new).collect::<Result<Vec<Map>>>());
        let maps = maps.transpose()?;
        let place = files.first().map_or("", ModelFile::name).to_string();
        let engine = Engine::new(&place, opts.no_uring || opts.mapped, opts.depth, reasons);
        Ok(RealModelFiles { files, maps, engine, align })
    }

    fn file(&self, id: FileId) -> Result<Arc<OpenFile>> {
        match self.files.get(id.0 as usize) {
            Some(opened) => Ok(opened.file.clone()),
            None => fail!(Invalid, "file {}: the model has {} files", id.0, self.files.len()),
        }
    }

    /// # Safety
    /// As for [`ModelFiles::transfer`].
    unsafe fn copy(&self, maps: &[Map], piece: &Piece) -> Result<()> {
        let index = piece.file.0 as usize;
        let (Some(map), Some(opened)) = (maps.get(index), self.files.get(index)) else {
            return Err(Status::Invalid.into());
        };
        // Closes most of the window in which a truncated file is fatal, not all.
        opened.check_bytes()?;
        // SAFETY: the caller's promise.
        unsafe { map.read(piece) };
        Ok(())
    }
}

/// Switches all files to direct reads; returns their alignment.
fn all_direct(files: &[ModelFile]) -> Result<u64> {
    let request = AllocationRequest { bytes: 2 * READ_UNIT_BYTES, ..AllocationRequest::default() };
    let scratch = Buffer::map(&request, None)?;
    let mut align = 1;
    for opened in files {
        align = opened.use_direct_reads(&scratch)?.max(align);
    }
    Ok(align)
}

impl ModelFiles for RealModelFiles {
    fn align_bytes(&self) -> u64 {
        self.align
    }

    fn engine(&self) -> &str {
        if self.maps.is_some() { "mapped" } else { self.engine.name(self.align > 1) }
    }

    fn fallback(&self) -> Option<&str> {
        self.engine.fallback().filter(|_| self.maps.is_none())
    }

    fn count(&self) -> u32 {
        self.files.len() as u32 // at most MAX_FIXED_FILES
    }

    fn stamp(&self, file: u32) -> Stamp {
        self.files.get(file as usize).map_or(Stamp::default(), |opened| opened.stamp)
    }

    fn check(&self, file: u32) -> Result<()> {
        fork::check()?;
        match self.files.get(file as usize) {
            Some(opened) => opened.check(),
            None => fail!(Invalid, "file {file}: the model has {} files", self.files.len()),
        }
    }

    fn descriptor(&self, file: u32) -> Result<Descriptor> {
        fork::check()?;
        let Some(opened) = self.files.get(file as usize) else {
            fail!(Invalid, "file {file}: the model has {} files", self.files.len());
        };
        if self.align == 1 {
            let why = self.engine.fallback().unwrap_or("as requested");
            fail!(Unavailable, "{} is read through the page cache: {why}", opened.name());
        }
        opened.descriptor()
    }

    unsafe fn transfer(&self, pieces: &mut [Piece]) {
        let forked = fork::check();
        for piece in pieces.iter_mut() {
            let checked = forked.clone().and_then(|()| check_piece(self, piece));
            piece.begin(checked);
        }
        match &self.maps {
            Some(maps) => {
                for piece in pieces.iter_mut().filter(|piece| piece.is_open()) {
                    // SAFETY: the caller's promise.
                    piece.result = unsafe { self.copy(maps, piece) };
                }
            }
            // SAFETY: the caller's promise.
            None => unsafe { self.engine.transfer(pieces, self.align, &|id| self.file(id)) },
        }
        for piece in pieces.iter().filter(|piece| piece.result.is_ok()) {
            // SAFETY: the caller's promise; nothing of the piece is in flight.
            unsafe { zero_past(piece, self.bytes(piece.file.0)) };
            if let (1, None, Some(file)) =
                (self.align, &self.maps, self.files.get(piece.file.0 as usize))
            {
                file.forget(piece.offset, piece.bytes());
            }
        }
    }
}
