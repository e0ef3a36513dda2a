//! `kvtier doctor`: what this machine has, and what that means for you.

pub mod remote;

use std::path::Path;

use kvtier::base::budget::{DEFAULT_HOST_PERCENT, default_reserve_bytes};
use kvtier::base::clock::Clock;
use kvtier::base::fork;
use kvtier::base::machine::{MemoryFacts, descriptor_limit};
use kvtier::base::status::Result;
use kvtier::base::sync::cores;
use kvtier::device::{Device, cuda};
use kvtier::io::files::Files;
use kvtier::io::probe;
use kvtier::io::real::{RealFiles, RealOpts};

use crate::direct::{self, Trial};
use crate::human;

/// How good a finding is.
#[derive(Clone, Copy)]
enum Mark {
    Good,
    Limited,
    Absent,
}

struct Finding {
    check: &'static str,
    mark: Mark,
    value: String,
    means: String,
}

impl Finding {
    fn new(check: &'static str, mark: Mark, value: impl Into<String>, means: &str) -> Finding {
        Finding { check, mark, value: value.into(), means: means.to_string() }
    }

    fn print(&self, json: bool) {
        let Finding { check, value, means, .. } = self;
        let mark = match self.mark {
            Mark::Good => "good",
            Mark::Limited => "limited",
            Mark::Absent => "absent",
        };
        if json {
            let line =
                serde_json::json!({ "check": check, "mark": mark, "value": value, "means": means });
            println!("{line}");
        } else {
            println!("{check:<18} {mark:<8} {value}");
            println!("{:<18} {:<8} {means}\n", "", "");
        }
    }
}

/// Prints the findings.
pub fn run(path: &Path, json: bool) {
    let facts = MemoryFacts::probe();
    let findings = [
        cpu(),
        memory(&facts),
        cgroup(&facts),
        default_budget(&facts),
        pin_quota(&facts),
        descriptors(),
        transparent(&facts),
        reserved(&facts),
        fork_detection(),
        io_uring(),
        direct(path),
        disk_engine(path),
        cuda(),
        disk_to_device(path),
    ];
    findings.iter().for_each(|finding| finding.print(json));
}

fn cpu() -> Finding {
    let n = cores();
    Finding::new(
        "cores",
        if n > 1 { Mark::Good } else { Mark::Limited },
        n.to_string(),
        "a runtime starts as many workers, at most 4, unless told otherwise",
    )
}

fn memory(facts: &MemoryFacts) -> Finding {
    let value = format!("{} of {}", human(facts.available_bytes), human(facts.total_bytes));
    Finding::new(
        "memory",
        Mark::Good,
        value,
        "available without swapping, by the kernel's estimate",
    )
}

fn cgroup(facts: &MemoryFacts) -> Finding {
    match facts.cgroup {
        None => Finding::new(
            "cgroup limit",
            Mark::Good,
            "none",
            "no container limit: a host budget is bounded by available memory alone",
        ),
        Some(c) => Finding::new(
            "cgroup limit",
            Mark::Limited,
            format!(
                "v{}: {} of {} left ({} of the use is reclaimable cache)",
                c.version,
                human(c.headroom_bytes()),
                human(c.limit_bytes),
                human(c.reclaimable_bytes)
            ),
            "a host budget never exceeds this headroom: beyond it the kernel kills the process",
        ),
    }
}

fn default_budget(facts: &MemoryFacts) -> Finding {
    let usable = facts.effective_bytes().saturating_sub(default_reserve_bytes(facts));
    Finding::new(
        "default budget",
        if usable > 0 { Mark::Good } else { Mark::Absent },
        human(usable / 100 * DEFAULT_HOST_PERCENT),
        "what the host tier gets when no number is given: half of what can be had, less a reserve",
    )
}

fn pin_quota(facts: &MemoryFacts) -> Finding {
    match facts.lock_limit_bytes {
        None => Finding::new(
            "pin quota",
            Mark::Good,
            "unlimited",
            "buffers can be locked in RAM, as fast device copies want them",
        ),
        Some(limit) => Finding::new(
            "pin quota",
            if facts.lockable_bytes() >= 1 << 30 { Mark::Good } else { Mark::Limited },
            format!("{} of {} left", human(facts.lockable_bytes()), human(limit)),
            "pinning more fails with KVT_E_PIN_QUOTA: raise RLIMIT_MEMLOCK (ulimit -l)",
        ),
    }
}

fn descriptors() -> Finding {
    let limit = descriptor_limit();
    Finding::new(
        "descriptors",
        if limit >= 128 { Mark::Good } else { Mark::Limited },
        match limit {
            libc::RLIM_INFINITY => "unlimited".to_string(),
            limit => limit.to_string(),
        },
        "a disk tier of any size keeps 32 segments open, and some more for a moment; without a free \
         descriptor its calls end with KVT_E_LIMIT: raise RLIMIT_NOFILE (ulimit -n)",
    )
}

fn transparent(facts: &MemoryFacts) -> Finding {
    let (mark, means) = match facts.thp_mode.as_str() {
        "always" | "madvise" => (Mark::Good, "KVT_BUFFER_TRY_HUGE gets huge pages"),
        "never" => (Mark::Limited, "KVT_BUFFER_TRY_HUGE has no effect: more TLB misses"),
        _ => (Mark::Absent, "this kernel has none"),
    };
    let value = if facts.thp_mode.is_empty() { "none" } else { &facts.thp_mode };
    Finding::new("transparent huge", mark, value, means)
}

fn reserved(facts: &MemoryFacts) -> Finding {
    Finding::new(
        "reserved huge",
        if facts.hugetlb_free_pages > 0 { Mark::Good } else { Mark::Absent },
        format!("{} free pages of {}", facts.hugetlb_free_pages, human(facts.hugetlb_page_bytes)),
        "for KVT_BUFFER_HUGETLB; set vm.nr_hugepages to have some",
    )
}

fn fork_detection() -> Finding {
    match fork::kernel_wipes() {
        true => Finding::new(
            "fork detection",
            Mark::Good,
            "kernel",
            "a forked child is told KVT_E_FORKED",
        ),
        false => Finding::new(
            "fork detection",
            Mark::Limited,
            "atfork handler",
            "this kernel lacks MADV_WIPEONFORK: a child made by a raw clone is not noticed",
        ),
    }
}

fn io_uring() -> Finding {
    match probe::io_uring() {
        Ok(()) => Finding::new(
            "io_uring",
            Mark::Good,
            "allowed",
            "a disk tier puts transfers into its rings, unless disk(uring=false) says otherwise",
        ),
        Err(error) => Finding::new(
            "io_uring",
            Mark::Absent,
            error.message(),
            "a disk tier transfers by plain calls of its threads; container profiles often forbid io_uring",
        ),
    }
}

fn direct(path: &Path) -> Finding {
    match probe::direct_alignment(path) {
        Ok(align) => Finding::new(
            "direct I/O",
            Mark::Good,
            format!("{align} bytes in {}", path.display()),
            "a disk tier here bypasses the page cache, with this alignment",
        ),
        Err(error) => Finding::new(
            "direct I/O",
            Mark::Absent,
            error.message(),
            "a disk tier here would go through the page cache and count against the cgroup",
        ),
    }
}

/// What the files of a store come to here: some are opened as a store does it.
fn disk_engine(path: &Path) -> Finding {
    const CHECK: &str = "disk engine";
    match opened(path) {
        Ok((engine, None)) => Finding::new(
            CHECK,
            Mark::Good,
            engine,
            "how a disk tier here transfers: nothing of that is made do with",
        ),
        Ok((engine, Some(why))) => {
            let means = format!("how a disk tier here transfers, for want of better: {why}");
            Finding::new(CHECK, Mark::Limited, engine, &means)
        }
        Err(error) => Finding::new(
            CHECK,
            Mark::Absent,
            error.message(),
            "a disk tier cannot be made here: name another directory with --path",
        ),
    }
}

/// The way of transfers in a directory, and why it is not the best one.
fn opened(path: &Path) -> Result<(String, Option<String>)> {
    let place = path.join(format!(".kvtier-doctor-{}", std::process::id()));
    let files = RealFiles::open(&place, &RealOpts::default())?;
    let found = (files.engine().to_string(), files.fallback().map(str::to_string));
    drop(files);
    if let Err(error) = std::fs::remove_dir_all(&place) {
        eprintln!("kvtier: {} stays: {error}", place.display());
    }
    Ok(found)
}

/// Each device is opened for a moment, so that what it says is what a store would have.
fn cuda() -> Finding {
    let check = "cuda devices";
    let opts = direct::opts(0, cuda::CopyMethodChoice::Measured);
    let found = match cuda::probe(opts.library.as_deref()) {
        Ok(found) if found.is_empty() => {
            return Finding::new(check, Mark::Absent, "none", "a driver without devices");
        }
        Ok(found) => found,
        Err(error) => return Finding::new(check, Mark::Absent, "none", error.message()),
    };
    let opened: Vec<_> = (0..found.len()).map(|at| described(at, found.len())).collect();
    let is_whole = |told: &cuda::Description| told.no_kernels.is_empty();
    let is_good = opened.iter().all(|opened| opened.as_ref().is_ok_and(is_whole));
    let mark = if is_good { Mark::Good } else { Mark::Limited };
    let words = found.iter().zip(opened).map(|(device, opened)| match opened {
        Ok(told) => told.to_string(),
        Err(error) => format!("{}: {}", device.name, error.message()),
    });
    let words: Vec<String> = words.collect();
    Finding::new(check, mark, words.join("; next: "), "how KV is copied to and from them")
}

/// With all kernels loaded: those that cannot be had are named, and why.
fn described(ordinal: usize, count: usize) -> Result<cuda::Description> {
    let opts = cuda::CudaOpts {
        peers: (0..count as u32).filter(|other| *other as usize != ordinal).collect(),
        ..direct::opts(ordinal as u32, cuda::CopyMethodChoice::Measured)
    };
    let device = cuda::Cuda::open(Clock::real(), &opts)?;
    device.load_kernels()?;
    Ok(device.describe())
}

/// Files that go to a GPU without passing through host memory: one is read, and looked at.
fn disk_to_device(path: &Path) -> Finding {
    const CHECK: &str = "disk to device";
    const BYTES: u64 = 2 << 20;
    let by_host = "weights go to a GPU by way of host memory: KVT_STREAM_DIRECT is refused";
    let device = match direct::first() {
        Ok(device) => device,
        Err(error) => return Finding::new(CHECK, Mark::Absent, error.message(), by_host),
    };
    let words = match device.direct() {
        Ok(way) => way.describe(),
        Err(error) => return Finding::new(CHECK, Mark::Absent, error.message(), by_host),
    };
    match Trial::new(&device, path, BYTES).and_then(|trial| trial.check()) {
        Ok(()) => Finding::new(
            CHECK,
            Mark::Good,
            format!("{words}, files in {}", path.display()),
            "KVT_STREAM_DIRECT has a GPU read weights here by itself",
        ),
        Err(error) => {
            let value = format!("{words}, but not in {}: {}", path.display(), error.message());
            Finding::new(CHECK, Mark::Limited, value, by_host)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_engine_is_what_files_of_a_store_have_and_nothing_stays() {
        let dir = std::env::temp_dir().join(format!("kvtier-doctor-test-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let found = disk_engine(&dir);
        let (engine, why) = opened(&dir).expect("it can be made");
        assert_eq!(found.value, engine);
        assert!(engine.starts_with("io_uring, ") || engine.starts_with("threads, "), "{engine}");
        assert_eq!(matches!(found.mark, Mark::Good), why.is_none());
        assert!(found.means.ends_with(&why.unwrap_or_default()), "{}", found.means);
        assert_eq!(std::fs::read_dir(&dir).expect("there").count(), 0);
        std::fs::remove_dir(&dir).expect("empty");
        assert!(matches!(disk_engine(&dir.join("no/where")).mark, Mark::Absent));
    }
}
