//! Declared tensors as checkpoints hold them: names and logical shapes.

/// The checkpoint tensors of one declared tensor: (name, shape).
pub type Entries = Vec<(String, Vec<usize>)>;

/// What a declared tensor of a logical `shape` becomes in a checkpoint: itself, with its `export` shape if it has one; or
/// one tensor per unit of its leading dimension where the name has `{axis}`, one after the other.
pub fn entries(name: &str, shape: &[usize], export: Option<&[usize]>) -> Entries {
    match (name.find('{'), name.find('}')) {
        (Some(open), Some(close)) if open < close && !shape.is_empty() => (0..shape[0])
            .map(|unit| (format!("{}{unit}{}", &name[..open], &name[close + 1..]), shape[1..].to_vec()))
            .collect(),
        _ => vec![(name.into(), export.unwrap_or(shape).to_vec())],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_tensors_of_their_own() {
        let two = entries("experts.fc1.weight{experts}", &[2, 3, 4], None);
        assert_eq!(two, [("experts.fc1.weight0".into(), vec![3, 4]), ("experts.fc1.weight1".into(), vec![3, 4])]);
        assert_eq!(entries("conv", &[6, 4], Some(&[6, 1, 4])), [("conv".into(), vec![6, 1, 4])]);
    }
}
