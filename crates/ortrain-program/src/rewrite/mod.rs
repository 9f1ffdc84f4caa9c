//! Rewrites of nests: one nest put into another, behind another, or over another space.

pub(crate) mod embed;
pub(crate) mod splice;
