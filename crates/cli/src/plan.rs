//! `kvtier plan`: how much memory, disk and remote hold of a model's KV, and the least of each.

use kvtier::meta::dtype::Dtype;
use kvtier::meta::layout::{Group, Layout};
use kvtier::store::capacity::{self, Capacity, Sizes};
use serde_json::{Value, json};

use crate::human;
use crate::stream::sizes::bytes;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Chunks that a store knows unless its spec says more.
const USUAL_CHUNKS: u64 = 1 << 20;

/// A model, and the sizes of a store.
#[derive(clap::Args)]
pub struct Args {
    /// Layers that keep KV
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=4096))]
    layers: u16,
    /// KV heads of a layer (grouped queries: fewer than query heads)
    #[arg(long, required_unless_present = "latent", value_parser = clap::value_parser!(u32).range(1..))]
    kv_heads: Option<u32>,
    /// Numbers of a head
    #[arg(long, required_unless_present = "latent", value_parser = clap::value_parser!(u32).range(1..))]
    head_dim: Option<u32>,
    /// Instead of heads: numbers of a token's latent vector, the turned part included (MLA), such as 576
    #[arg(long, conflicts_with_all = ["kv_heads", "head_dim"], value_parser = clap::value_parser!(u32).range(1..))]
    latent: Option<u32>,
    /// Of what type: f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8, int4
    #[arg(long, default_value = "bf16")]
    dtype: String,
    /// Tokens of a chunk
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
    /// Tokens of a conversation, or of all that is to be kept
    #[arg(long)]
    tokens: u64,
    /// Host memory, such as 8GiB
    #[arg(long, default_value = "1GiB", value_parser = bytes)]
    host: u64,
    /// A disk, such as 200GiB
    #[arg(long, default_value = "0", value_parser = bytes)]
    disk: u64,
    /// Bytes of a segment of the disk; by default one part in 1024 of it, from 8 to 64 MiB
    #[arg(long, default_value = "0", value_parser = bytes)]
    segment: u64,
    /// What a remote has, such as 1TiB
    #[arg(long, default_value = "0", value_parser = bytes)]
    remote: u64,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// What a tier holds.
struct Row {
    tier: &'static str,
    bytes: u64,
    chunks: u64,
}

/// Prints what the sizes hold.
pub fn run(args: &Args) -> Outcome<()> {
    let layout = layout(args)?;
    let sizes = Sizes { host_bytes: args.host, disk_bytes: args.disk, segment_bytes: args.segment };
    let all = capacity::of(&layout, &sizes)?;
    let mut rows = vec![Row { tier: "host", bytes: args.host, chunks: all.host_chunks }];
    if args.disk > 0 {
        rows.push(Row { tier: "disk", bytes: args.disk, chunks: all.disk_chunks });
    }
    if args.remote > 0 {
        let chunks = args.remote / all.chunk_bytes.max(1);
        rows.push(Row { tier: "remote", bytes: args.remote, chunks });
    }
    match args.json {
        true => println!("{}", object(args, &all, &rows)),
        false => show(args, &all, &rows),
    }
    Ok(())
}

fn layout(args: &Args) -> Outcome<Layout> {
    let Some(dtype) = Dtype::from_name(&args.dtype) else {
        let known: Vec<&str> = Dtype::ALL.iter().map(|dtype| dtype.name()).collect();
        return Err(format!("unknown dtype '{}': one of {}", args.dtype, known.join(", ")).into());
    };
    let group = match (args.latent, args.kv_heads, args.head_dim) {
        (Some(numbers), ..) => Group::mla_latent(0..args.layers, numbers, dtype)?,
        (None, Some(heads), Some(dim)) => Group::gqa(0..args.layers, heads, dim, dtype)?,
        _ => return Err("give --kv-heads and --head-dim, or --latent".into()),
    };
    Ok(Layout::new(args.chunk, vec![group])?)
}

/// Chunks that all of the tokens take.
fn wanted(args: &Args) -> u64 {
    args.tokens.div_ceil(u64::from(args.chunk))
}

/// Chunks that the store has to know, if those are more than usual.
fn more_chunks(all: &Capacity) -> Option<u64> {
    let chunks = all.host_chunks + all.disk_chunks;
    (chunks > USUAL_CHUNKS).then(|| chunks.next_multiple_of(1 << 16))
}

fn spec(args: &Args, all: &Capacity) -> String {
    let mut spec = format!("store(host={}", args.host);
    if args.disk > 0 {
        spec += &format!(", disk=disk(path=\"kv\", bytes={}", args.disk);
        if args.segment > 0 {
            spec += &format!(", segment={}", args.segment);
        }
        spec += ")";
    }
    if let Some(chunks) = more_chunks(all) {
        spec += &format!(", chunks={chunks}");
    }
    spec + ")"
}

fn object(args: &Args, all: &Capacity, rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let tokens = row.chunks * u64::from(args.chunk);
        let times = row.chunks as f64 / wanted(args).max(1) as f64;
        json!({ "tier": row.tier, "bytes": row.bytes, "chunks": row.chunks, "tokens": tokens,
            "times": times })
    };
    json!({
        "token_bytes": all.chunk_bytes / u64::from(args.chunk),
        "chunk_bytes": all.chunk_bytes,
        "cell_bytes": all.cell_bytes,
        "wanted_bytes": wanted(args) * all.chunk_bytes,
        "wanted_chunks": wanted(args),
        "tiers": rows.iter().map(row).collect::<Vec<Value>>(),
        "disk_chunk_bytes": all.disk_chunk_bytes,
        "segment_bytes": all.segment_bytes,
        "table_bytes_per_chunk": all.table_bytes,
        "table_bytes": (all.host_chunks + all.disk_chunks) * all.table_bytes,
        "least_host_bytes": all.least_host_bytes,
        "least_disk_bytes": all.least_disk_bytes,
        "spec": spec(args, all),
    })
}

fn show(args: &Args, all: &Capacity, rows: &[Row]) {
    let each = u64::from(args.chunk);
    println!("a token   {}", human(all.chunk_bytes / each));
    println!(
        "a chunk   {} of {each} tokens, in {} cells of {}",
        human(all.chunk_bytes),
        args.layers,
        human(all.cell_bytes)
    );
    println!(
        "{} tokens   {} in {} chunks\n",
        args.tokens,
        human(wanted(args) * all.chunk_bytes),
        wanted(args)
    );
    println!(
        "{:<8}{:>12}{:>12}{:>14}  times {} tokens",
        "tier", "size", "chunks", "tokens", args.tokens
    );
    for row in rows {
        let times = row.chunks as f64 / wanted(args).max(1) as f64;
        let tokens = row.chunks * each;
        println!(
            "{:<8}{:>12}{:>12}{tokens:>14}  {times:.1}",
            row.tier,
            human(row.bytes),
            row.chunks
        );
    }
    let tables = (all.host_chunks + all.disk_chunks) * all.table_bytes;
    println!(
        "\ntables    {} for each chunk in memory or on disk: {} when both are full, from the budget \
         that pays for host memory",
        human(all.table_bytes),
        human(tables)
    );
    if tables > args.host / 4 {
        println!(
            "          a disk this large needs much memory for its tables: larger chunks (--chunk) \
             need less"
        );
    }
    println!(
        "least     host {}, disk {} (its segments must hold a cell)",
        human(all.least_host_bytes),
        human(all.least_disk_bytes)
    );
    if all.segment_bytes > 0 {
        println!(
            "disk      segments of {}; about three of them and 4 % are kept free to write and clean",
            human(all.segment_bytes)
        );
    }
    println!("open      {}", spec(args, all));
}
