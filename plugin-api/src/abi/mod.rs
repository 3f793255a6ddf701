//! The `repr(C)` types that cross the boundary.
