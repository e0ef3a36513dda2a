//! Specs of sparse policies with a given budget of tokens, for texts of some hundred symbols.

use kvtier::sparse::Shape;

/// Policies with a budget: the names for [`with_budget`].
pub const NAMES: [&str; 18] = [
    "quest",
    "quest_shared",
    "arkvale",
    "predict",
    "external",
    "dsa",
    "h2o",
    "tova",
    "snapkv",
    "pyramidkv",
    "adakv",
    "keydiff",
    "knorm",
    "streaming",
    "duo",
    "minference",
    "a_shape",
    "random",
];

/// The spec of a policy with a budget of tokens; None for an unknown name.
pub fn with_budget(name: &str, shape: &Shape, symbols: usize, budget: usize) -> Option<String> {
    let (heads, dim) = (shape.query_heads, shape.key_heads * shape.key_dim);
    let share = share(symbols, budget);
    let alpha = || -> Vec<String> {
        (0..shape.layers * shape.key_heads).map(|at| format!("0.{}", at % 10)).collect()
    };
    let (less, half) = (budget.saturating_sub(20), budget / 2);
    Some(match name {
        // Includes the newest page, as the authors' kernels do.
        "quest" => format!("quest(budget={budget}, dense=0, last=always)"),
        "quest_shared" => format!("quest(budget={budget}, dense=0, last=always, share=bound)"),
        // One page at each end: two would use up a small budget.
        "arkvale" => format!("arkvale(budget={budget}, page=16, dense=0, sinks=1, window=1)"),
        "predict" => format!("predict(of=quest(budget={budget}, dense=0, last=always))"),
        "external" => format!("external(topk={})", budget / shape.block_tokens as usize),
        "dsa" => format!("dsa(topk={budget}, heads={heads}, dim={dim}, state=f32)"),
        "h2o" => format!("h2o(sink=4, recent=16, budget={less})"),
        "tova" => format!("tova(budget={budget})"),
        "snapkv" | "adakv" => format!("{name}(budget={budget}, window=32)"),
        // Steep enough that layers differ with a small budget.
        "pyramidkv" => format!("pyramidkv(budget={budget}, window=16, beta=4)"),
        "keydiff" | "knorm" => format!("{name}(budget={budget}, sink=4, recent={half})"),
        "streaming" => format!("streaming(sinks=4, recent={})", budget - 4),
        "duo" => format!("duo(alpha=\"{}\", sink=4, recent={})", alpha().join(" "), budget - 4),
        "minference" => format!("minference(budget={share}, sinks=4, recent=16)"),
        "a_shape" => format!("minference(type=a_shape, vertical=4, slash={less})"),
        "random" => format!("random(budget={budget})"),
        _ => return None,
    })
}

/// A budget as a share of the tokens.
pub fn share(symbols: usize, budget: usize) -> f64 {
    (budget as f64 / symbols as f64).min(1.0)
}
