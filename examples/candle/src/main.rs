//! Answers prompts with a Llama, and stores the KV of the conversation on disk.

#![forbid(unsafe_code)]

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use clap::Parser;
use kvtier::api::Level;
use kvtier_candle::chat::{KvStore, Run, run};
use kvtier_candle::llama::Llama;
use tokenizers::Tokenizer;

/// Answers a prompt with a Llama model, on the processor. With --disk a second run of the same
/// conversation loads the KV of the first one.
#[derive(Parser)]
struct Args {
    /// Folder with config.json, model.safetensors and tokenizer.json.
    #[arg(long)]
    model: PathBuf,
    /// Folder of the store, made if it is missing. Without it nothing is stored.
    #[arg(long)]
    disk: Option<PathBuf>,
    /// File of the conversation: read if it is there, and written with the prompt and the answer.
    #[arg(long)]
    chat: Option<PathBuf>,
    /// The user's prompt.
    #[arg(long, default_value = "Tell me a story about a lighthouse.")]
    prompt: String,
    /// Reads the prompt from a file instead.
    #[arg(long, conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Most tokens of the answer.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Wait until the KV is synced to disk: it then survives a crash of the machine.
    #[arg(long)]
    durable: bool,
    /// Print the times as one line of JSON at the end.
    #[arg(long)]
    json: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let (model, digest) = Llama::load(&args.model)?;
    let tokenizer =
        Tokenizer::from_file(args.model.join("tokenizer.json")).map_err(tokenizer_error)?;
    let level = if args.durable { Level::Durable } else { Level::Ram };
    let open = |disk: &PathBuf| KvStore::open(disk, &model.config, digest.as_bytes(), level);
    let store = args.disk.as_ref().map(open).transpose()?;

    let prompt = match &args.prompt_file {
        Some(path) => read(path)?,
        None => args.prompt.clone(),
    };
    let mut tokens = args.chat.as_deref().map_or(Ok(Vec::new()), chat_of)?;
    tokens.extend(encode(&tokenizer, &prompt, !tokens.is_empty())?);

    let mut decoder = tokenizer.decode_stream(true);
    let print = |token| {
        if let Ok(Some(text)) = decoder.step(token) {
            print!("{text}");
            let _ = std::io::stdout().flush();
        }
    };
    let on_stored = |tokens| {
        if store.is_some() {
            eprintln!("stored: {tokens} tokens");
        }
    };
    let done = run(&model, store.as_ref(), &tokens, args.tokens as usize, print, on_stored)?;
    println!();
    report(&done, args.json);
    if let Some(path) = &args.chat {
        tokens.extend(&done.tokens);
        let text = serde_json::to_string(&tokens)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    store.map_or(Ok(()), KvStore::close)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Tokens of an earlier conversation: the text of tokens need not give the same tokens again.
fn chat_of(path: &Path) -> Result<Vec<u32>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    serde_json::from_str(&read(path)?)
        .with_context(|| format!("{} is no conversation: a JSON list of tokens", path.display()))
}

/// A turn of the user as the model's chat template has it, if its tokenizer knows the marks.
fn encode(tokenizer: &Tokenizer, prompt: &str, continues: bool) -> Result<Vec<u32>> {
    let text = match tokenizer.token_to_id("<|im_start|>") {
        None => prompt.to_string(),
        Some(_) => format!(
            "{}<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
            if continues { "\n" } else { "" }
        ),
    };
    Ok(tokenizer.encode(text, false).map_err(tokenizer_error)?.get_ids().to_vec())
}

fn tokenizer_error(error: tokenizers::Error) -> anyhow::Error {
    anyhow!("tokenizer: {error}")
}

fn report(run: &Run, json: bool) {
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    let Run { prompt_tokens, restored_tokens, .. } = run;
    eprintln!(
        "restored: {restored_tokens} of {prompt_tokens} tokens in {:.1} ms, computed the others in \
         {:.1} ms; first token after {:.1} ms",
        ms(run.restore),
        ms(run.prefill),
        ms(run.first_token)
    );
    if json {
        let line = serde_json::json!({
            "prompt_tokens": prompt_tokens,
            "restored_tokens": restored_tokens,
            "restore_ms": ms(run.restore),
            "prefill_ms": ms(run.prefill),
            "first_token_ms": ms(run.first_token),
        });
        println!("{line}");
    }
}
