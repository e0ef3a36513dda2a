//! `kvtier plan`: how many tokens of a model's KV each tier holds, and the minimum sizes.

use kvtier::meta::dtype::Dtype;
use kvtier::meta::layout::{Group, Layout};
use kvtier::store::capacity::{self, Capacity, Sizes};
use serde_json::{Value, json};

use crate::human;
use crate::stream::sizes::bytes;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Default of `chunks` in a store's spec.
const DEFAULT_CHUNKS: u64 = 1 << 20;

/// The model, and the sizes of the store.
#[derive(clap::Args)]
pub struct Args {
    /// Layers with KV
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=4096))]
    layers: u16,
    /// KV heads of a layer (with grouped queries fewer than query heads)
    #[arg(long, required_unless_present = "latent", value_parser = clap::value_parser!(u32).range(1..))]
    kv_heads: Option<u32>,
    /// Dimension of a head
    #[arg(long, required_unless_present = "latent", value_parser = clap::value_parser!(u32).range(1..))]
    head_dim: Option<u32>,
    /// Instead of heads: dimension of the latent vector including the RoPE part (MLA), such as 576
    #[arg(long, conflicts_with_all = ["kv_heads", "head_dim"], value_parser = clap::value_parser!(u32).range(1..))]
    latent: Option<u32>,
    /// Number type: f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8, int4
    #[arg(long, default_value = "bf16")]
    dtype: String,
    /// Tokens in a chunk
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
    /// Tokens of a conversation, or of all KV to store
    #[arg(long)]
    tokens: u64,
    /// Size of host memory, such as 8GiB
    #[arg(long, default_value = "1GiB", value_parser = bytes)]
    host: u64,
    /// Size of the disk tier, such as 200GiB
    #[arg(long, default_value = "0", value_parser = bytes)]
    disk: u64,
    /// Size of a disk segment; 0 = 1/1024 of the disk, from 8 to 64 MiB
    #[arg(long, default_value = "0", value_parser = bytes)]
    segment: u64,
    /// Size of a remote, such as 1TiB
    #[arg(long, default_value = "0", value_parser = bytes)]
    remote: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The capacity of a tier.
struct Row {
    tier: &'static str,
    bytes: u64,
    chunks: u64,
}

/// Prints the capacities.
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

/// Chunks of all tokens.
fn chunks_needed(args: &Args) -> u64 {
    args.tokens.div_ceil(u64::from(args.chunk))
}

/// The parameter `chunks` of the spec, if the default is too small.
fn more_chunks(all: &Capacity) -> Option<u64> {
    let chunks = all.host_chunks + all.disk_chunks;
    (chunks > DEFAULT_CHUNKS).then(|| chunks.next_multiple_of(1 << 16))
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
        let times = row.chunks as f64 / chunks_needed(args).max(1) as f64;
        json!({ "tier": row.tier, "bytes": row.bytes, "chunks": row.chunks, "tokens": tokens,
            "times": times })
    };
    json!({
        "token_bytes": all.chunk_bytes / u64::from(args.chunk),
        "chunk_bytes": all.chunk_bytes,
        "cell_bytes": all.cell_bytes,
        "wanted_bytes": chunks_needed(args) * all.chunk_bytes,
        "wanted_chunks": chunks_needed(args),
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
    println!("token     {}", human(all.chunk_bytes / each));
    println!(
        "chunk     {} for {each} tokens, in {} cells of {}",
        human(all.chunk_bytes),
        args.layers,
        human(all.cell_bytes)
    );
    println!(
        "{} tokens   {} in {} chunks\n",
        args.tokens,
        human(chunks_needed(args) * all.chunk_bytes),
        chunks_needed(args)
    );
    println!(
        "{:<8}{:>12}{:>12}{:>14}  times {} tokens",
        "tier", "size", "chunks", "tokens", args.tokens
    );
    for row in rows {
        let times = row.chunks as f64 / chunks_needed(args).max(1) as f64;
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
        "\ntables    {} for each chunk in memory or on disk: {} when both are full, charged to the \
         budget of host memory",
        human(all.table_bytes),
        human(tables)
    );
    if tables > args.host / 4 {
        println!(
            "          a disk of this size needs much memory for its tables: increase --chunk to \
             reduce it"
        );
    }
    println!(
        "minimum   host {}, disk {} (a segment must hold one cell)",
        human(all.least_host_bytes),
        human(all.least_disk_bytes)
    );
    if all.segment_bytes > 0 {
        println!(
            "disk      segments of {}; about three segments and 4 % stay free for writes and compaction",
            human(all.segment_bytes)
        );
    }
    println!("spec      {}", spec(args, all));
}
