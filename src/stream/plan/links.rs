//! Link rates as text: `h2d=13,disk=3.3`.

use crate::base::status::{Error, Result, Status};
use crate::stream::plan::Links;

/// Longest accepted text, in bytes.
const MAX_TEXT_BYTES: usize = 256;
/// Highest accepted rate in GB/s: faster than any link, and sums cannot overflow.
const MAX_GB: f64 = 1e6;
const KEYS: &str = "h2d (host to device), disk, cpu (the processor's weights)";

impl Links {
    /// Parses `h2d=13,disk=3.3,cpu=40`, in gigabytes (1e9) a second. Links that are not named have
    /// the rate 0 (not known).
    pub fn parse(text: &str) -> Result<Links> {
        if text.len() > MAX_TEXT_BYTES {
            let words = format!("links have {} bytes, the limit is {MAX_TEXT_BYTES}", text.len());
            return Err(Error::at(Status::Limit, MAX_TEXT_BYTES, words));
        }
        let mut links = Links::default();
        let mut offset = 0;
        for part in text.split(',') {
            links.set(part, offset)?;
            offset += part.len() + 1;
        }
        Ok(links)
    }

    fn set(&mut self, part: &str, offset: usize) -> Result<()> {
        let wrong = |words: String| {
            Err(Error::at(Status::Spec, offset, format!("{words} at offset {offset}")))
        };
        let Some((key, value)) = part.split_once('=') else {
            return wrong(format!("expected key=GB/s such as h2d=13, found {part:?}"));
        };
        let field = match key.trim() {
            "h2d" => &mut self.device,
            "disk" => &mut self.disk,
            "cpu" => &mut self.processor,
            other => return wrong(format!("unknown link {other:?}, known are {KEYS}")),
        };
        if *field != 0 {
            return wrong(format!("{:?} is set twice", key.trim()));
        }
        match value.trim().parse::<f64>() {
            Ok(gb) if gb > 0.0 && gb <= MAX_GB => {
                *field = ((gb * 1e9) as u64).max(1);
                Ok(())
            }
            Ok(gb) => wrong(format!("{gb} GB/s, accepted is more than 0 up to {MAX_GB}")),
            Err(_) => wrong(format!("{:?} is no number of GB/s", value.trim())),
        }
    }

    /// These rates; those that are not known are taken from `other`.
    pub fn or(self, other: Links) -> Links {
        let or = |a, b| if a == 0 { b } else { a };
        Links {
            disk: or(self.disk, other.disk),
            device: or(self.device, other.device),
            processor: or(self.processor, other.processor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_parsed_in_gigabytes() {
        let links = Links::parse("h2d=13, disk=3.3,cpu=40").unwrap();
        assert_eq!((links.device, links.disk), (13_000_000_000, 3_300_000_000));
        assert_eq!(links.processor, 40_000_000_000);
        assert_eq!(Links::parse("disk=1e-3").unwrap().disk, 1_000_000);
        let other = Links { device: 7, disk: 9, processor: 0 };
        let merged = Links::parse("h2d=2").unwrap().or(other);
        assert_eq!((merged.device, merged.disk, merged.processor), (2_000_000_000, 9, 0));
    }

    #[test]
    fn errors_name_the_offset() {
        let tries = [
            ("", 0),
            ("h2d", 0),
            ("h2d=13,", 7),
            ("h2d=13,gpu=3", 7),
            ("disk=3,disk=4", 7),
            ("disk=0", 0),
            ("disk=-1", 0),
            ("disk=nan", 0),
            ("disk=inf", 0),
            ("disk=3GB", 0),
            ("disk=1e9", 0),
        ];
        for (text, offset) in tries {
            let error = Links::parse(text).unwrap_err();
            assert_eq!(error.status(), Status::Spec, "{text}");
            assert_eq!(error.detail().unwrap().offset, Some(offset), "{text}");
        }
        assert_eq!(Links::parse(&"x".repeat(300)).unwrap_err().status(), Status::Limit);
        assert!(Links::parse("pci=3").unwrap_err().message().contains("h2d"));
    }
}
