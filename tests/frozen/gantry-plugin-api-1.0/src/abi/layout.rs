//! One number for the whole layout of the boundary.
//!
//! Every struct that crosses is declared through [`abi_struct!`](crate::abi_struct), which hashes its name, size and
//! each field's name, offset and type as written. Same hash, same layout: the host then skips abi_stable's full check.

/// Start value of the hash (FNV-1a, 64 bits).
pub const SEED: u64 = 0xcbf2_9ce4_8422_2325;

/// Hash of `h` followed by `bytes`. Blanks are left out: compilers print types with different spacing.
pub const fn mix(mut h: u64, bytes: &[u8]) -> u64 {
    let mut i = 0;
    while i < bytes.len() {
        if !bytes[i].is_ascii_whitespace() {
            h = (h ^ bytes[i] as u64).wrapping_mul(0x0100_0000_01b3);
        }
        i += 1;
    }
    h
}

/// Hash of `h` followed by a number.
pub const fn mix_number(mut h: u64, n: u64) -> u64 {
    let bytes = n.to_le_bytes();
    let mut i = 0;
    while i < bytes.len() {
        h = (h ^ bytes[i] as u64).wrapping_mul(0x0100_0000_01b3);
        i += 1;
    }
    h
}

/// Declares a `repr(C)` struct of the boundary together with the hash of its layout, `LAYOUT`.
#[macro_export]
#[doc(hidden)]
macro_rules! abi_struct {
    ($(#[$meta:meta])* pub struct $name:ident $(<$life:lifetime>)? {
        $($(#[$fmeta:meta])* pub $field:ident : $ty:ty),* $(,)?
        $(; grown $(#[$gmeta:meta])* pub $grown:ident : $gty:ty)?
    }) => {
        #[repr(C)]
        #[derive(abi_stable::StableAbi)]
        $(#[$meta])*
        pub struct $name $(<$life>)? {
            $($(#[$fmeta])* pub $field: $ty,)*
            $($(#[$gmeta])* #[cfg(feature = "grown")] pub $grown: $gty)?
        }

        impl $(<$life>)? $name $(<$life>)? {
            /// Hash of the names, offsets and types of the fields.
            pub const LAYOUT: u64 = {
                use $crate::abi::layout::{SEED, mix, mix_number};
                let h = mix(SEED, stringify!($name).as_bytes());
                let h = mix_number(h, size_of::<Self>() as u64);
                $(
                    let h = mix(h, stringify!($field).as_bytes());
                    let h = mix(h, stringify!($ty).as_bytes());
                    let h = mix_number(h, core::mem::offset_of!(Self, $field) as u64);
                )*
                $(
                    #[cfg(feature = "grown")]
                    let h = mix(mix(h, stringify!($grown).as_bytes()), stringify!($gty).as_bytes());
                )?
                h
            };
        }
    };
}
