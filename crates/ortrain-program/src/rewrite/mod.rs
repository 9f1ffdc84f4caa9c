//! Rewrites of nests: inlining of a producer, appending of a consumer, and changes of the index space.

pub(crate) mod index_map;
pub(crate) mod inline_nest;
