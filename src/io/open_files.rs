//! Table of open files by id. An id has the index of a slot and the generation of the slot, which
//! changes when the file is closed. So the id of a closed file stays invalid.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::io::files::{FileId, MAX_FILES};

/// A slot of the table.
struct Slot<T> {
    generation: u16,
    file: Option<T>,
}

/// A table of open files.
pub struct OpenFiles<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u16>,
}

impl<T> Default for OpenFiles<T> {
    fn default() -> Self {
        OpenFiles { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> OpenFiles<T> {
    /// Adds a file.
    pub fn add(&mut self, file: T) -> Result<FileId> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => self.grow()?,
        };
        let Some(slot) = self.slots.get_mut(usize::from(index)) else {
            return Err(Status::Limit.into());
        };
        slot.file = Some(file);
        Ok(FileId(u32::from(slot.generation) << 16 | u32::from(index)))
    }

    /// Adds a slot.
    fn grow(&mut self) -> Result<u16> {
        let index = match u16::try_from(self.slots.len()) {
            Ok(index) if self.slots.len() < MAX_FILES => index,
            _ => fail!(Limit, "{MAX_FILES} files are open, which is the limit"),
        };
        // Reserve memory in both lists, so that closing a file allocates none.
        let slots = self.slots.len() + 1;
        let more = slots - self.free.len();
        let reserved = self.slots.try_reserve(1).and_then(|()| self.free.try_reserve(more));
        reserved.map_err(|_| Status::NoMem)?;
        self.slots.push(Slot { generation: 0, file: None });
        Ok(index)
    }

    /// The slot of an id, if the generation matches.
    fn slot(&mut self, id: FileId) -> Option<&mut Slot<T>> {
        let slot = self.slots.get_mut((id.0 & 0xFFFF) as usize)?;
        (u32::from(slot.generation) == id.0 >> 16).then_some(slot)
    }

    /// The file of an id.
    pub fn get(&mut self, id: FileId) -> Result<&mut T> {
        let file = self.slot(id).and_then(|slot| slot.file.as_mut());
        file.ok_or_else(|| Status::Closed.into())
    }

    /// Removes a file.
    pub fn remove(&mut self, id: FileId) -> Option<T> {
        let slot = self.slot(id)?;
        let file = slot.file.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(id.0 as u16);
        Some(file)
    }

    /// Removes all files.
    pub fn clear(&mut self) {
        for index in 0..self.slots.len() as u32 {
            let generation = self.slots.get(index as usize).map_or(0, |slot| slot.generation);
            self.remove(FileId(u32::from(generation) << 16 | index));
        }
    }

    /// The open files.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.file.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_valid_until_its_file_is_closed() {
        let mut files = OpenFiles::default();
        let (a, b) = (files.add('a').expect("room"), files.add('b').expect("room"));
        assert_eq!(files.get(a), Ok(&mut 'a'));
        assert_eq!(files.get(b), Ok(&mut 'b'));
        assert_eq!((files.remove(a), files.remove(a)), (Some('a'), None));
        let c = files.add('c').expect("room");
        assert_eq!(c.0 & 0xFFFF, a.0 & 0xFFFF, "the slot is used again");
        assert_eq!(files.get(a).map_err(|e| e.status()), Err(Status::Closed));
        assert_eq!(files.get(c), Ok(&mut 'c'));
        assert_eq!(files.get(FileId(77)).map_err(|e| e.status()), Err(Status::Closed));
        assert_eq!(files.iter().collect::<String>(), "cb");
        files.clear();
        assert!(files.get(c).is_err() && files.iter().next().is_none());
    }

    #[test]
    fn the_number_of_open_files_is_limited() {
        let mut files = OpenFiles::default();
        let ids: Vec<_> = (0..MAX_FILES).map(|i| files.add(i).expect("room")).collect();
        assert_eq!(files.add(0).map_err(|e| e.status()), Err(Status::Limit));
        assert_eq!(files.remove(ids[9]), Some(9));
        assert!(files.add(0).is_ok());
    }
}
