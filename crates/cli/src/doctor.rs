//! `kvtier doctor`: checks of this machine, each with its meaning for the user.

pub mod remote;

use std::io::ErrorKind;
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

use crate::direct::{self, DirectReadTest};
use crate::human;

/// The grade of a finding.
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
        "by default a runtime starts this many workers, at most 4",
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
            "no container limit: only available memory bounds a host budget",
        ),
        Some(c) => Finding::new(
            "cgroup limit",
            Mark::Limited,
            format!(
                "v{}: {} of {} left ({} of the usage is reclaimable cache)",
                c.version,
                human(c.headroom_bytes()),
                human(c.limit_bytes),
                human(c.reclaimable_bytes)
            ),
            "a host budget never exceeds this headroom; above it the kernel kills the process",
        ),
    }
}

fn default_budget(facts: &MemoryFacts) -> Finding {
    let usable = facts.effective_bytes().saturating_sub(default_reserve_bytes(facts));
    Finding::new(
        "default budget",
        if usable > 0 { Mark::Good } else { Mark::Absent },
        human(usable / 100 * DEFAULT_HOST_PERCENT),
        "default size of the host tier: half of the available memory, less a reserve",
    )
}

fn pin_quota(facts: &MemoryFacts) -> Finding {
    match facts.lock_limit_bytes {
        None => Finding::new(
            "pin quota",
            Mark::Good,
            "unlimited",
            "buffers can be locked in RAM, which fast device copies need",
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
        "a disk tier keeps 32 segments open, and briefly a few more; without a free descriptor its \
         calls fail with KVT_E_LIMIT: raise RLIMIT_NOFILE (ulimit -n)",
    )
}

fn transparent(facts: &MemoryFacts) -> Finding {
    let (mark, means) = match facts.thp_mode.as_str() {
        "always" | "madvise" => (Mark::Good, "KVT_BUFFER_TRY_HUGE uses huge pages"),
        "never" => (Mark::Limited, "KVT_BUFFER_TRY_HUGE has no effect; expect more TLB misses"),
        _ => (Mark::Absent, "this kernel has no transparent huge pages"),
    };
    let value = if facts.thp_mode.is_empty() { "none" } else { &facts.thp_mode };
    Finding::new("transparent huge", mark, value, means)
}

fn reserved(facts: &MemoryFacts) -> Finding {
    Finding::new(
        "reserved huge",
        if facts.hugetlb_free_pages > 0 { Mark::Good } else { Mark::Absent },
        format!("{} free pages of {}", facts.hugetlb_free_pages, human(facts.hugetlb_page_bytes)),
        "used by KVT_BUFFER_HUGETLB; set vm.nr_hugepages to reserve some",
    )
}

fn fork_detection() -> Finding {
    match fork::kernel_wipes() {
        true => Finding::new(
            "fork detection",
            Mark::Good,
            "kernel",
            "calls in a forked child fail with KVT_E_FORKED",
        ),
        false => Finding::new(
            "fork detection",
            Mark::Limited,
            "atfork handler",
            "this kernel lacks MADV_WIPEONFORK: a child of a raw clone is not detected",
        ),
    }
}

fn io_uring() -> Finding {
    match probe::io_uring() {
        Ok(()) => Finding::new(
            "io_uring",
            Mark::Good,
            "allowed",
            "a disk tier uses it for transfers, except with disk(uring=false)",
        ),
        Err(error) => Finding::new(
            "io_uring",
            Mark::Absent,
            error.message(),
            "a disk tier uses blocking calls of its threads; container profiles often forbid io_uring",
        ),
    }
}

fn direct(path: &Path) -> Finding {
    match probe::direct_alignment(path) {
        Ok(align) => Finding::new(
            "direct I/O",
            Mark::Good,
            format!("{align} bytes in {}", path.display()),
            "a disk tier here bypasses the page cache with this alignment",
        ),
        Err(error) => Finding::new(
            "direct I/O",
            Mark::Absent,
            error.message(),
            "a disk tier here would use the page cache, which counts against the cgroup",
        ),
    }
}

/// The I/O engine that a store would use here, found by opening files as a store does.
fn disk_engine(path: &Path) -> Finding {
    const CHECK: &str = "disk engine";
    match open_files(path) {
        Ok((engine, None)) => Finding::new(
            CHECK,
            Mark::Good,
            engine,
            "I/O engine of a disk tier here, without a fallback",
        ),
        Ok((engine, Some(why))) => {
            let means = format!("I/O engine of a disk tier here; it is a fallback: {why}");
            Finding::new(CHECK, Mark::Limited, engine, &means)
        }
        Err(error) => Finding::new(
            CHECK,
            Mark::Absent,
            error.message(),
            "a disk tier cannot be created here: choose another directory with --path",
        ),
    }
}

/// The I/O engine in a directory, and why it is a fallback.
fn open_files(path: &Path) -> Result<(String, Option<String>)> {
    let place = path.join(format!(".kvtier-doctor-{}", std::process::id()));
    let files = RealFiles::open(&place, &RealOpts::default())?;
    let found = (files.engine().to_string(), files.fallback().map(str::to_string));
    drop(files);
    // Usually the drop has removed the directory.
    match std::fs::remove_dir_all(&place) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            eprintln!("kvtier: cannot remove {}: {error}", place.display());
        }
        _ => {}
    }
    Ok(found)
}

/// Opens each device briefly, so that its description is the one a store would get.
fn cuda() -> Finding {
    let check = "cuda devices";
    let opts = direct::opts(0, cuda::CopyMethodChoice::Measured);
    let found = match cuda::probe(opts.library.as_deref()) {
        Ok(found) if found.is_empty() => {
            return Finding::new(check, Mark::Absent, "none", "the driver has no devices");
        }
        Ok(found) => found,
        Err(error) => return Finding::new(check, Mark::Absent, "none", error.message()),
    };
    let described: Vec<_> = (0..found.len()).map(|at| describe_device(at, found.len())).collect();
    let is_whole = |description: &cuda::Description| description.no_kernels.is_empty();
    let is_good = described.iter().all(|device| device.as_ref().is_ok_and(is_whole));
    let mark = if is_good { Mark::Good } else { Mark::Limited };
    let words = found.iter().zip(described).map(|(device, described)| match described {
        Ok(description) => description.to_string(),
        Err(error) => format!("{}: {}", device.name, error.message()),
    });
    let words: Vec<String> = words.collect();
    Finding::new(check, mark, words.join("; next: "), "methods of copies to and from the devices")
}

/// The description with all kernels loaded; it names missing kernels and why they are missing.
fn describe_device(ordinal: usize, count: usize) -> Result<cuda::Description> {
    let opts = cuda::CudaOpts {
        peers: (0..count as u32).filter(|other| *other as usize != ordinal).collect(),
        ..direct::opts(ordinal as u32, cuda::CopyMethodChoice::Measured)
    };
    let device = cuda::Cuda::open(Clock::real(), &opts)?;
    device.load_kernels()?;
    Ok(device.describe())
}

/// Tests direct reads from a file into GPU memory by reading and comparing one.
fn disk_to_device(path: &Path) -> Finding {
    const CHECK: &str = "disk to device";
    const BYTES: u64 = 2 << 20;
    let by_host = "weights reach a GPU through host memory; KVT_STREAM_DIRECT is refused";
    let device = match direct::first() {
        Ok(device) => device,
        Err(error) => return Finding::new(CHECK, Mark::Absent, error.message(), by_host),
    };
    let words = match device.direct() {
        Ok(method) => method.describe(),
        Err(error) => return Finding::new(CHECK, Mark::Absent, error.message(), by_host),
    };
    match DirectReadTest::new(&device, path, BYTES).and_then(|test| test.check()) {
        Ok(()) => Finding::new(
            CHECK,
            Mark::Good,
            format!("{words}, files in {}", path.display()),
            "KVT_STREAM_DIRECT reads weights here directly into GPU memory",
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
    fn disk_engine_reports_the_engine_of_a_store_and_removes_its_files() {
        let dir = std::env::temp_dir().join(format!("kvtier-doctor-test-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let found = disk_engine(&dir);
        let (engine, why) = open_files(&dir).expect("it can be made");
        assert_eq!(found.value, engine);
        assert!(engine.starts_with("io_uring, ") || engine.starts_with("threads, "), "{engine}");
        assert_eq!(matches!(found.mark, Mark::Good), why.is_none());
        assert!(found.means.ends_with(&why.unwrap_or_default()), "{}", found.means);
        assert_eq!(std::fs::read_dir(&dir).expect("found").count(), 0);
        std::fs::remove_dir(&dir).expect("empty");
        assert!(matches!(disk_engine(&dir.join("no/where")).mark, Mark::Absent));
    }
}
