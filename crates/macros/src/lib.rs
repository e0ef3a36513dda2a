//! Macros of the C boundary in `src/ffi`, for the crate `kvtier` alone: they name its modules.
//!
//! - [`macro@capi`] exports a function: it adds the symbol name, catches panics and turns the
//!   body's `Result` into a status and an error handle.
//! - [`macro@Plain`] implements `Plain`, and `HasSize` where it applies, for a C struct, and has
//!   the compiler check every field.
//! - [`macro@Rows`] makes a table of a struct of statistics: name, help, kind and value of a field.
//!
//! They stand on items that are written out in full, because cbindgen reads the sources before
//! macros are expanded.

use proc_macro::{Delimiter, Group, TokenStream, TokenTree};

/// Exports a function to C.
///
/// The function is written with its C signature. If it returns `kvt_status_t`, its body is
/// written as that of a function which returns `Result<()>`:
///
/// ```ignore
/// #[capi]
/// pub unsafe extern "C" fn kvt_buffer_info(
///     buffer: *const kvt_buffer_t,
///     out: *mut kvt_buffer_info_t,
///     err: *mut *mut kvt_error_t,
/// ) -> kvt_status_t {
///     check_out(out)?;
///     let buffer = inspect(buffer)?;
///     write(out, &buffer.info());
///     Ok(())
/// }
/// ```
///
/// # What the macro adds
///
/// - `#[unsafe(no_mangle)]`. All exported names begin with `kvt_`, a prefix that belongs to this
///   library, so no symbol of another library is replaced. The macro refuses other names.
/// - A guard around the body: a panic becomes `KVT_E_PANIC`, nothing unwinds into C. If the
///   function has a parameter `err`, the guard also reports the error there.
/// - In an `unsafe fn`, a `# Safety` section in the documentation (the C header does not need it),
///   and one `unsafe` block around the guard. The caller promised what that section and the
///   parameters' comments say. The unsafe functions that bodies
///   call (`read`, `write`, `text`, `numbers`, `Rows::new`, ...) ask for exactly that and check
///   the rest: null, lengths, sizes, alignment. A body explains an unsafe operation of its own
///   only if it relies on something else.
///
/// A function that returns anything else gets the symbol name alone.
#[proc_macro_attribute]
pub fn capi(_: TokenStream, item: TokenStream) -> TokenStream {
    match exported(item) {
        Ok(tokens) => tokens,
        Err(message) => error(message),
    }
}

/// Implements `Plain` for a C struct, and `HasSize` if its first field is `struct_size: u64`.
///
/// `Plain` promises that any bytes are a valid value of the struct. The macro refuses a struct
/// without `repr(C)`, and the compiler refuses one with a field whose type is not `Plain` itself:
/// integers, floats, raw pointers, nullable functions, arrays and structs of these.
#[proc_macro_derive(Plain)]
pub fn plain(item: TokenStream) -> TokenStream {
    match implementations(item) {
        Ok(tokens) => tokens,
        Err(message) => error(message),
    }
}

/// Makes `ROWS` and `add_counters` for a struct of statistics.
///
/// `ROWS` has a `crate::base::exposition::Row` for each public field but `struct_size`. The help is the
/// field's documentation. A field is a counter, or a gauge if it has the attribute `#[gauge]`.
/// `add_counters` adds the counters of another value.
#[proc_macro_derive(Rows, attributes(gauge))]
pub fn rows(item: TokenStream) -> TokenStream {
    match table(item) {
        Ok(tokens) => tokens,
        Err(message) => error(message),
    }
}

const SAFETY: &str = "\n# Safety\n\nEach pointer is null or valid: for the length that the \
    parameter beside it states, or for the size that the struct states. No other thread changes the \
    memory during the call.";

fn error(message: &str) -> TokenStream {
    tokens(&format!("compile_error!({message:?});"))
}

fn tokens(text: &str) -> TokenStream {
    text.parse().unwrap_or_default()
}

fn is_word(token: Option<&TokenTree>, word: &str) -> bool {
    matches!(token, Some(TokenTree::Ident(ident)) if ident.to_string() == word)
}

fn is_punct(token: Option<&TokenTree>, punct: char) -> bool {
    matches!(token, Some(TokenTree::Punct(one)) if one.as_char() == punct)
}

fn group(token: Option<&TokenTree>, delimiter: Delimiter) -> Option<&Group> {
    match token {
        Some(TokenTree::Group(group)) if group.delimiter() == delimiter => Some(group),
        _ => None,
    }
}

fn exported(item: TokenStream) -> Result<TokenStream, &'static str> {
    let mut all: Vec<TokenTree> = item.into_iter().collect();
    let Some(at) = all.iter().position(|token| is_word(Some(token), "fn")) else {
        return Err("capi stands on a function");
    };
    if !all.get(at + 1).is_some_and(|name| name.to_string().starts_with("kvt_")) {
        return Err("the name of an exported function begins with kvt_");
    }
    let Some(parameters) = group(all.get(at + 2), Delimiter::Parenthesis) else {
        return Err("an exported function has no generic parameters");
    };
    let parameters: Vec<TokenTree> = parameters.stream().into_iter().collect();
    let reports = parameters
        .windows(2)
        .any(|pair| is_word(pair.first(), "err") && is_punct(pair.get(1), ':'));
    let is_unsafe = all.iter().take(at).any(|token| is_word(Some(token), "unsafe"));
    let gives_status = is_punct(all.get(at + 3), '-')
        && is_word(all.get(at + 5), "kvt_status_t")
        && group(all.get(at + 6), Delimiter::Brace).is_some();
    if reports && !(is_unsafe && gives_status) {
        return Err("a function with a parameter err is unsafe and returns kvt_status_t");
    }
    let mut out = tokens("#[unsafe(no_mangle)]");
    if is_unsafe {
        // Behind the attributes, so that the section follows the function's own comment.
        let visibility = all.iter().position(|token| matches!(token, TokenTree::Ident(_)));
        let rest = all.split_off(visibility.unwrap_or_default());
        out.extend(all);
        out.extend(tokens(&format!("#[doc = {SAFETY:?}]")));
        all = rest;
    }
    if gives_status && let Some(body) = all.pop() {
        let guard = if reports { "guard_err" } else { "guard" };
        let mut arguments = tokens(if reports { "err, ||" } else { "||" });
        arguments.extend([body]);
        let mut call = tokens(&format!("crate::ffi::abi::{guard}"));
        call.extend([TokenTree::from(Group::new(Delimiter::Parenthesis, arguments))]);
        if is_unsafe {
            let block = TokenTree::from(Group::new(Delimiter::Brace, call));
            call = tokens("unsafe");
            call.extend([block]);
        }
        all.push(Group::new(Delimiter::Brace, call).into());
    }
    out.extend(all);
    Ok(out)
}

fn implementations(item: TokenStream) -> Result<TokenStream, &'static str> {
    let all: Vec<TokenTree> = item.into_iter().collect();
    let is_c = |group: &Group| group.stream().to_string().replace(' ', "") == "repr(C)";
    if !all.iter().any(|token| group(Some(token), Delimiter::Bracket).is_some_and(is_c)) {
        return Err("a Plain struct has repr(C)");
    }
    let Some(at) = all.iter().position(|token| is_word(Some(token), "struct")) else {
        return Err("Plain is for structs");
    };
    let Some(name) = all.get(at + 1) else { return Err("the struct has no name") };
    let Some(body) = group(all.get(at + 2), Delimiter::Brace) else {
        return Err("a Plain struct has named fields and no generic parameters");
    };
    let (first, types) = fields(body.stream());
    let mut text = format!("unsafe impl crate::ffi::abi::Plain for {name} {{}}");
    if first == "struct_size" {
        text += &format!("unsafe impl crate::ffi::abi::HasSize for {name} {{}}");
    }
    let mut out = tokens(&text);
    // The bound of a function that is instantiated for each field is the check.
    let mut checks = tokens("const fn plain<T: crate::ffi::abi::Plain>() {}");
    if first == "struct_size" {
        checks.extend(tokens(&format!(
            "const fn size(of: &{name}) -> &u64 {{ &of.struct_size }} let _ = size;"
        )));
    }
    for kind in types {
        checks.extend(tokens("plain::<"));
        checks.extend(kind);
        checks.extend(tokens(">();"));
    }
    out.extend(tokens("const _: () ="));
    out.extend([TokenTree::from(Group::new(Delimiter::Brace, checks))]);
    out.extend(tokens(";"));
    Ok(out)
}

/// The name of the first field, and the types of all.
fn fields(body: TokenStream) -> (String, Vec<TokenStream>) {
    let (mut first, mut types) = (String::new(), Vec::new());
    let mut name: Option<TokenTree> = None;
    let mut kind: Option<TokenStream> = None;
    let (mut depth, mut before_is_dash) = (0, false);
    for token in body {
        let Some(tokens) = &mut kind else {
            // Attributes and visibility come before the name, the name before its colon.
            if is_punct(Some(&token), ':') {
                if types.is_empty() {
                    first = name.take().map_or_else(String::new, |name| name.to_string());
                }
                kind = Some(TokenStream::new());
            }
            name = Some(token);
            continue;
        };
        match &token {
            TokenTree::Punct(punct) if punct.as_char() == '<' => depth += 1,
            TokenTree::Punct(punct) if punct.as_char() == '>' && !before_is_dash => depth -= 1,
            TokenTree::Punct(punct) if punct.as_char() == ',' && depth == 0 => {
                types.extend(kind.take());
                continue;
            }
            _ => {}
        }
        before_is_dash = is_punct(Some(&token), '-');
        tokens.extend([token]);
    }
    types.extend(kind);
    (first, types)
}

fn table(item: TokenStream) -> Result<TokenStream, &'static str> {
    let all: Vec<TokenTree> = item.into_iter().collect();
    let Some(at) = all.iter().position(|token| is_word(Some(token), "struct")) else {
        return Err("Rows is for structs");
    };
    let Some(name) = all.get(at + 1) else { return Err("the struct has no name") };
    let Some(body) = group(all.get(at + 2), Delimiter::Brace) else {
        return Err("a struct of statistics has named fields and no generic parameters");
    };
    let (mut rows, mut sums) = (String::new(), String::new());
    let body: Vec<TokenTree> = body.stream().into_iter().collect();
    for field in body.split(|token| is_punct(Some(token), ',')) {
        let Some(colon) = field.iter().position(|token| is_punct(Some(token), ':')) else {
            continue;
        };
        let Some(field_name) = colon.checked_sub(1).and_then(|at| field.get(at)) else { continue };
        if is_word(Some(field_name), "struct_size") {
            continue;
        }
        let (mut help, mut kind) = (String::new(), "Counter");
        for attribute in field.iter().filter_map(|one| group(Some(one), Delimiter::Bracket)) {
            let tokens: Vec<TokenTree> = attribute.stream().into_iter().collect();
            match tokens.as_slice() {
                [word] if is_word(Some(word), "gauge") => kind = "Gauge",
                [word, _, text] if is_word(Some(word), "doc") => {
                    help += if help.is_empty() { "" } else { ", " };
                    help += &text.to_string();
                }
                _ => {}
            }
        }
        if help.is_empty() {
            return Err("a field of statistics has a comment, which is the metric's help");
        }
        rows += &format!(
            "crate::base::exposition::Row {{ name: \"{field_name}\", help: concat!({help}).trim_ascii(), \
             kind: crate::base::exposition::Kind::{kind}, get: |all| all.{field_name}.into() }},"
        );
        if kind == "Counter" {
            sums += &format!("self.{field_name} += other.{field_name};");
        }
    }
    Ok(tokens(&format!(
        "impl {name} {{ \
         /// A row for each field.\n\
         pub const ROWS: &'static [crate::base::exposition::Row<{name}>] = &[{rows}]; \
         /// Adds the counters of another instance.\n\
         pub fn add_counters(&mut self, other: &{name}) {{ {sums} }} }}"
    )))
}
