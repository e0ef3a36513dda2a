//! What a store takes is what its budget has committed: the kernel says how much memory the
//! process has, in a process of its own for each configuration.

use kvtier_testkit::fixtures::store as support;

use std::process::Command;
use std::sync::Arc;

use kvtier::base::budget::{Budget, BudgetOpts, Tier};
use kvtier::base::status::Status;
use kvtier::kv::core::moves::Level;
use kvtier::kv::store::Store;
use support::{Done, Engine, Home, Model, Scratch, Shape, document, marks_of, runtime, spec_of};

const CONFIG: &str = "KVTIER_RESIDENT_CONFIG";
const MIB: u64 = 1 << 20;
/// What a process may take beside what is committed, and the part of that which is beside it too.
const BESIDE: u64 = 16 * MIB;
const PART: u64 = 50;

/// A configuration: host memory, the budget, bytes of a cell, layers, whether there is a disk, how
/// much is stored, and what else the spec says.
struct Setup {
    host: u64,
    budget: u64,
    cell: usize,
    layers: usize,
    disk: bool,
    stored: u64,
    more: &'static str,
}

const SETUPS: [(&str, Setup); 7] = [
    (
        "small",
        Setup { host: 16, budget: 64, cell: 4096, layers: 4, disk: false, stored: 200, more: "" },
    ),
    (
        "usual",
        Setup { host: 64, budget: 128, cell: 4096, layers: 4, disk: false, stored: 500, more: "" },
    ),
    (
        "large_cells",
        Setup {
            host: 64,
            budget: 128,
            cell: 1 << 20,
            layers: 2,
            disk: false,
            stored: 500,
            more: "",
        },
    ),
    (
        "by_cells",
        Setup {
            host: 32,
            budget: 128,
            cell: 4096,
            layers: 8,
            disk: true,
            stored: 200,
            more: ",grain=cell",
        },
    ),
    (
        "on_disk",
        Setup { host: 32, budget: 128, cell: 4096, layers: 1, disk: true, stored: 300, more: "" },
    ),
    (
        "auto",
        Setup {
            host: 32,
            budget: 160,
            cell: 4096,
            layers: 2,
            disk: false,
            stored: 300,
            more: ",policy=auto",
        },
    ),
    (
        "few_chunks",
        Setup {
            host: 64,
            budget: 128,
            cell: 16384,
            layers: 2,
            disk: true,
            stored: 300,
            more: ",chunks=2048",
        },
    ),
];

/// Bytes of this process that are in memory, as the kernel counts them.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("a kernel that says it");
    let line = text.lines().find(|line| line.starts_with("Rss:")).expect("a line of it");
    let kib = line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    kib.expect("a number") * 1024
}

fn put(home: &Home, space: u32, engine: &mut Engine, back: &mut Engine, number: u32) {
    let tokens = document(number, engine.tokens);
    let session = home.session(space, &tokens);
    engine.compute(&marks_of(0, &tokens));
    let done = home.put(session, Level::Ram, engine);
    assert_eq!(done, Done { status: Status::Ok, tokens: engine.tokens }, "{number}");
    if number % 3 == 0 && home.get(session, back).status == Status::Ok {
        back.check(&marks_of(0, &tokens), 0..tokens.len(), 0..back.model.layers);
    }
    home.end(session);
}

/// The process that is measured. Does nothing in a usual run.
#[test]
fn child() {
    let Ok(name) = std::env::var(CONFIG) else { return };
    let setup = &SETUPS.iter().find(|(one, _)| *one == name).expect("one of them").1;
    let scratch = Scratch::new("resident");
    // Two planes of two heads of f16: a chunk of 16 tokens has cells of the wanted length.
    let model = Model { layers: setup.layers, heads: 2, run: setup.cell / 64, chunk: 16 };
    let tokens = 16 * 8;
    let mut engine = Engine::new(model, Shape::Tokens, tokens);
    engine.compute(&marks_of(0, &document(0, tokens)));
    let mut back = Engine::new(model, Shape::Tokens, tokens);
    let runtime = runtime();
    let mut limits = [None; 5];
    limits[Tier::Host as usize] = Some(setup.budget * MIB);
    let opts = BudgetOpts { limits, reserve_bytes: Some(0), strict: false };
    let budget: Arc<Budget> = Budget::open(runtime.core(), &opts).expect("a budget");
    let disk = match setup.disk {
        true => format!("disk=disk(path=\"{}\",bytes=96MiB,segment=2MiB),", scratch.0.display()),
        false => String::new(),
    };
    let spec = spec_of(&format!("store({disk}host={}MiB{})", setup.host, setup.more));
    let before = resident();
    let store = Store::open(runtime.core(), Some(&budget), &spec).expect("opened");
    let home = Home { store, runtime };
    let space = home.space(1, &model);
    let each = model.chunk_bytes() * 8;
    let mut worst = i64::MIN;
    let mut said = (0, 0);
    for number in 0..(setup.stored * MIB / each) as u32 {
        put(&home, space, &mut engine, &mut back, number);
        if number % 64 != 0 {
            continue;
        }
        let committed = budget.lane(Tier::Host).committed_bytes;
        let grown = resident().saturating_sub(before);
        let over = grown as i64 - (committed + committed / PART) as i64;
        if over > worst {
            (worst, said) = (over, (grown, committed));
        }
    }
    println!("\nresident {worst} {} {}", said.0, said.1);
}

#[test]
fn what_is_resident_is_committed() {
    let program = std::env::current_exe().expect("this program");
    for (name, _) in &SETUPS {
        let out = Command::new(&program)
            .args(["--exact", kvtier_testkit::test_name!("child"), "--nocapture"])
            .arg("--test-threads=1")
            .env(CONFIG, name)
            .output()
            .expect("started");
        let text = String::from_utf8_lossy(&out.stdout);
        let line = text.lines().find_map(|line| line.strip_prefix("resident "));
        let line = line.unwrap_or_else(|| panic!("{name}: {text}"));
        let numbers: Vec<i64> = line.split(' ').map(|n| n.parse().expect("a number")).collect();
        let (over, mib) = (numbers[0], |at: usize| numbers[at] / MIB as i64);
        println!("{name}: {} MiB resident, {} MiB committed", mib(1), mib(2));
        assert!(over <= BESIDE as i64, "{name}: {} MiB for {} committed", mib(1), mib(2));
    }
}
