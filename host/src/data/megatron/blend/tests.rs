//! Orders of blends; the stored ones of Megatron-LM are checked by the goldens.

use super::super::Dtype;
use super::super::sample::Boundaries;
use super::super::tests::written;
use super::*;
use proptest::prelude::*;
use rstest::rstest;

/// Bits of numpy 2.4.6's sums of ((7919 i) % 1000 + 1) / 997, i < n; summed in order, all but the first differ.
#[rstest]
#[case(3, 0x3ffc_3ea6_e694_69ca)]
#[case(8, 0x4013_045d_76e2_78af)]
#[case(13, 0x4016_d93a_496f_b1f1)]
#[case(130, 0x4050_48fc_a977_e968)]
#[case(300, 0x4062_dce2_fc26_0084)]
fn sums_as_numpy_does(#[case] n: u64, #[case] bits: u64) {
    let weights: Vec<f64> = (0..n).map(|i| ((i * 7919) % 1000 + 1) as f64 / 997.0).collect();
    assert_eq!(sum(&weights).to_bits(), bits);
}

#[test]
fn takes_from_the_set_that_lags_most_and_from_the_first_of_equals() {
    let order = Order::by_weights(&[1.0, 1.0, 2.0], 8).unwrap();
    assert_eq!(order.dataset, [2, 0, 1, 2, 0, 2, 1, 2]);
    assert_eq!(order.sample, [0, 0, 0, 1, 1, 2, 1, 3]);
    assert_eq!(shares(&[0.25, 0.75], 61, 0.0), [16, 46]);
    assert_eq!(shares(&[0.25, 0.75], 61, SURPLUS), [17, 47]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_sample_comes_once_and_in_order(sizes in prop::collection::vec(1..30u64, 1..6)) {
        let order = Order::exhausting(&sizes).unwrap();
        for (set, &size) in sizes.iter().enumerate() {
            let of = order.dataset.iter().zip(&order.sample).filter(|(at, _)| usize::from(**at) == set);
            prop_assert_eq!(of.map(|(_, sample)| *sample).collect::<Vec<_>>(), (0..size).collect::<Vec<_>>());
        }
    }

    /// Nowhere is a set more than the number of sets away from its share.
    #[test]
    fn shares_are_kept_all_along(weights in prop::collection::vec(0.01..1.0f64, 1..6), size in 1..200u64) {
        let (order, shares) = (Order::by_weights(&weights, size).unwrap(), normalized(&weights).unwrap());
        let mut taken = vec![0; weights.len()];
        for (i, (&set, &sample)) in order.dataset.iter().zip(&order.sample).enumerate() {
            prop_assert_eq!(taken[usize::from(set)], sample);
            taken[usize::from(set)] += 1;
            for (share, &taken) in shares.iter().zip(&taken) {
                prop_assert!((share * (i + 1) as f64 - taken as f64).abs() <= weights.len() as f64);
            }
        }
        prop_assert_eq!(order.dataset.len() as u64, size);
    }
}

#[test]
fn a_blend_that_cannot_be_is_refused() {
    let sentence = |result: Result<Order>| result.unwrap_err().sentence;
    assert_eq!(sentence(Order::by_weights(&[], 1)), "a blend of 0 data sets; 1 to 32766 can be");
    let bad = "data set 1 of the blend has the weight 0; weights are above 0";
    assert_eq!(sentence(Order::by_weights(&[1.0, 0.0], 1)), bad);
    assert_eq!(sentence(Order::exhausting(&[1, 0])), bad);
    assert!(sentence(Order::by_weights(&[1.0, f64::NAN], 1)).contains("has the weight NaN"));
    assert_eq!(sentence(Order::by_weights(&[f64::MAX, f64::MAX], 1)), "the weights of the blend sum up to inf");
}

#[test]
fn a_blend_reads_its_sets_and_never_past_their_ends() {
    let (_one, a) = written(&[vec![1, 2, 3, 4, 5]], Dtype::U16);
    let (_two, b) = written(&[vec![6, 7, 8]], Dtype::U16);
    let files: [Arc<IndexedDataset>; 2] = [a.into(), b.into()];
    let boundaries = Boundaries::default();
    let config = GptConfig { sequence_length: 2, seed: 1, pad: -1, boundaries, drop_last_partial_validation: true };
    let cache = Cache::none();
    let source = Source { files: &files, split: "1", part: Part::Train, config: &config, cache: &cache };
    let blend = Blend::exhausting(&source, None).unwrap();
    let all = |blend: &Blend| {
        let mut tokens: Vec<_> = (0..blend.len()).map(|i| blend.sample(i).unwrap().tokens).collect();
        tokens.sort();
        tokens
    };
    assert_eq!(all(&blend), [[1, 2], [3, 4], [6, 7]]);
    assert_eq!(blend.sample(3).unwrap_err().sentence, "the blend has no sample 3, only 3");
    assert_eq!((all(&Blend::exhausting(&source, Some(2)).unwrap()).len(), blend.most_sequences()), (2, 1));
    let single = Blend::single(&Source { files: &files[..1], ..source }, None).unwrap();
    assert_eq!(all(&single), [[1, 2], [3, 4]]);
    let error = Blend::exhausting(&Source { part: Part::Test, ..source }, None).unwrap_err();
    assert_eq!(error.sentence, "the split \"1\" has no test part");
    let error = Blend::mixed(blend.sets, &Mix::Exhausting(vec![1, 2]), &cache).unwrap_err();
    assert_eq!(error.sentence, "the blend asks 2 samples of data set 1, which has 1");
}

#[test]
fn the_key_is_that_of_the_order_and_a_limit_names_the_place() {
    let (_one, a) = written(&[vec![1, 2, 3], vec![4, 5, 6, 7, 8, 9]], Dtype::U16);
    let files: [Arc<IndexedDataset>; 1] = [a.into()];
    let boundaries = Boundaries::default();
    let config = GptConfig { sequence_length: 2, seed: 1, pad: -1, boundaries, drop_last_partial_validation: true };
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let source = Source { files: &files, split: "1", part: Part::Train, config: &config, cache: &cache };
    let key = |samples| Blend::single(&source, samples).unwrap().key().to_string();
    // 8 tokens but one give 4 samples an epoch: 1 to 4 of them are the same order, 5 take another epoch.
    assert_eq!((key(Some(1)), key(Some(4)) == key(Some(5))), (key(Some(4)), false));
    let weighted = |weights, size| Blend::by_weights(&source, weights, size, SURPLUS).unwrap().key().to_string();
    assert_eq!(weighted(&[2.0], 3), weighted(&[4.0], 2));
    // From the cache as from memory.
    let fresh = Source { cache: &Cache::none(), ..source };
    let (kept, built) = (Blend::single(&source, Some(9)).unwrap(), Blend::single(&fresh, Some(9)).unwrap());
    assert!((0..9).all(|i| kept.sample(i).unwrap() == built.sample(i).unwrap()));
    assert!(kept.held_bytes() == 0 && built.held_bytes() > 0);
    let limit = Limit { vocab: Some(9), owner: "the model".into() };
    let failure = (0..4).find_map(|i| kept.sample_below(i, &limit).err()).unwrap();
    let path = files[0].path().display();
    assert_eq!(
        failure.sentence,
        format!("{path}: token 9 at place 5 of sequence 1 (byte 16); the model has a vocabulary of 9")
    );
    assert!((0..4).all(|i| kept.sample_below(i, &Limit { vocab: Some(10), ..limit.clone() }).is_ok()));
}
