//! Descriptions of stores from any text: each is refused with words that point into
//! it, or means the same when it is written down and read again.
#![no_main]

use kvtier::base::spec::Spec;
use kvtier::store::spec::StoreSpec;

fn check(text: &str) {
    match Spec::parse(text) {
        Ok(spec) => {
            let again = Spec::parse(&spec.to_string()).expect("what was written can be read");
            assert_eq!(again.to_string(), spec.to_string());
        }
        Err(error) => {
            let at = error.detail().and_then(|detail| detail.offset);
            assert!(at.is_none_or(|at| at <= text.len() as u64), "{error}");
        }
    }
    match StoreSpec::parse(text) {
        Ok(spec) => {
            let config = &spec.config;
            assert!((0.0..=1.0).contains(&config.high) && config.max_chunks > 0);
            assert!(spec.disk.is_none_or(|disk| disk.bytes > 0));
        }
        Err(error) => assert!(!error.message().is_empty()),
    }
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let text = String::from_utf8_lossy(input);
    check(&text);
    check(&format!("store({text})"));
    check(&format!("store(disk=disk(path=\"x\",bytes=1GiB,{text}))"));
});
