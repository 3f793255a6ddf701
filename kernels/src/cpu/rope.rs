//! See `cpu`.
