//! Rewrites of nests: one nest put into another, behind another, or over another space.

pub(crate) mod index_map;
pub(crate) mod inline_nest;
