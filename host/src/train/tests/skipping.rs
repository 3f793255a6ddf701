//! Steps that are left out: counted, saved with the run, the same after a restart.

use super::*;

#[test]
fn a_step_left_out_changes_nothing_and_is_counted() {
    let skip = recipe(&["train.on_nonfinite=skip"]);
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (outcome, weights) = train_recipe(&skip, whole.path(), Options::default(), Some(5), None);
    assert_eq!(outcome, Ok(Outcome::Finished));
    let line = &lines(whole.path())[4];
    assert_eq!(line["skipped"], "nan in the gradient of decoder.w, step 5");
    assert!(line.get("grad_norm").is_none() && line["lm_loss"].is_number(), "{line}");
    let counts: Vec<u64> = lines(whole.path()).iter().map(|line| line["skipped_steps"].as_u64().unwrap()).collect();
    assert_eq!(counts, [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]);
    // Saved right after the step that was left out, and gone on from there.
    let five = Options { last_step: Some(5), ..Default::default() };
    let four = Options { last_step: Some(4), ..Default::default() };
    let before = train_recipe(&skip, parts.path(), four, Some(5), None).1;
    assert_eq!(train_recipe(&skip, parts.path(), five, Some(5), None).1, before);
    assert_eq!(train_recipe(&skip, parts.path(), Options::default(), None, None).1, weights);
    assert_eq!(losses(parts.path()), losses(whole.path()));
    assert_eq!(lines(parts.path()).last().unwrap()["skipped_steps"], 1);
}

#[test]
fn the_loss_a_spike_is_measured_against_survives_a_restart() {
    // The loss of this engine rises at every step: with a window of 3 most steps are spikes.
    let set =
        ["train.on_nonfinite=skip", "train.spike_factor=1.3", "train.spike_window=3", "train.max_skipped_steps=3"];
    let guarded = recipe(&set);
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (outcome, weights) = train_recipe(&guarded, whole.path(), Options::default(), None, None);
    let skipped = |root: &Path| -> Vec<u64> {
        let lines = lines(root);
        lines.iter().filter(|l| l.get("skipped").is_some()).map(|l| l["step"].as_u64().unwrap()).collect()
    };
    let all = skipped(whole.path());
    assert!(!all.is_empty() && all[0] > 3, "{all:?}");
    for last in 1..=10 {
        let limit = Options { last_step: Some(last), ..Default::default() };
        let (part, _) = train_recipe(&guarded, parts.path(), limit, None, None);
        if part.is_err() {
            break;
        }
    }
    assert_eq!(skipped(parts.path()), all);
    assert_eq!(lines(parts.path()).last().unwrap()["step"], lines(whole.path()).last().unwrap()["step"]);
    if outcome.is_ok() {
        assert_eq!(train_recipe(&guarded, parts.path(), Options::default(), None, None).1, weights);
    }
}
