//! Namespaces for the state of sparse policies.

use super::{Key, fields};

const NAMESPACE: u32 = 1;
const RECIPE: u32 = 2;

/// The key of the namespace beside `namespace` that holds the state of policies called `recipe` for
/// its chunks.
pub fn sparse_key(namespace: &Key, recipe: &str) -> Key {
    let own = [(NAMESPACE, namespace.0.as_slice()), (RECIPE, recipe.as_bytes())];
    Key(fields::derive(fields::SPARSE, own.into_iter()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_parts_change_the_key() {
        let key = sparse_key(&Key([1; 32]), "quest");
        assert_eq!(key, sparse_key(&Key([1; 32]), "quest"));
        assert_ne!(key, sparse_key(&Key([2; 32]), "quest"));
        assert_ne!(key, sparse_key(&Key([1; 32]), "quest(page=8)"));
    }
}
