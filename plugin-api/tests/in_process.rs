//! The boundary without a library: a `Cx` over a host written here, through the same tables.

use gantry_plugin_api::abi::host::with_cx;
use gantry_plugin_api::ops::{self, Act, Op, RegionKind, Role};
use gantry_plugin_api::sdk::{
    Cx, DType, DimDesc, Error, ErrorKind, HostCalls, LogLevel, OpCall, Outputs, ParamId, RegionEntry, Result,
    SegmentDesc, TensorDesc, TensorRef,
};

/// Writes down what it is asked for.
#[derive(Default)]
struct Recorder {
    next: u32,
    calls: Vec<String>,
    skip_layer: Option<u32>,
}

impl Recorder {
    fn fresh(&mut self) -> TensorRef {
        self.next += 1;
        TensorRef { id: self.next, generation: 1 }
    }
}

impl HostCalls for Recorder {
    fn call(&mut self, call: OpCall<'_>, outputs: &mut Outputs) -> Result<()> {
        let ids: Vec<u32> = call.inputs.iter().map(|t| t.id).collect();
        self.calls.push(format!("{}#{} {ids:?}", call.path, call.op));
        if call.path == "explode" {
            panic!("host bug");
        }
        if call.op == ops::RmsNorm::ID {
            let attrs = ops::RmsNorm::decode(call.attrs).map_err(Error::plugin)?;
            self.calls.push(format!("eps {}", attrs.eps));
        }
        let n = if call.op == ops::Split::ID { 3 } else { 1 };
        for _ in 0..n {
            outputs.push(self.fresh());
        }
        Ok(())
    }
    fn param(&mut self, index: u32) -> Result<TensorRef> {
        Ok(TensorRef { id: 1000 + index, generation: 1 })
    }
    fn buffer(&mut self, index: u32) -> Result<TensorRef> {
        Ok(TensorRef { id: 2000 + index, generation: 1 })
    }
    fn region_begin(&mut self, path: &str, kind: RegionKind, layer: Option<u32>) -> Result<RegionEntry> {
        self.calls.push(format!("begin {path} {kind:?} {layer:?}"));
        Ok(if layer.is_some() && layer == self.skip_layer { RegionEntry::Skip } else { RegionEntry::Enter })
    }
    fn region_end(&mut self) -> Result<()> {
        self.calls.push("end".into());
        Ok(())
    }
    fn role(&mut self, role: Role, tensor: TensorRef) -> Result<TensorRef> {
        self.calls.push(format!("role {role:?}"));
        Ok(tensor)
    }
    fn step_input(&mut self, _name: &str) -> Result<TensorRef> {
        Ok(self.fresh())
    }
    fn batch_input(&mut self, port: &str) -> Result<TensorRef> {
        if port == "tokens" { Ok(self.fresh()) } else { Err(Error::shape(format!("no port \"{port}\""))) }
    }
    fn output(&mut self, port: &str, tensors: &[TensorRef]) -> Result<()> {
        self.calls.push(format!("output {port} {}", tensors.len()));
        Ok(())
    }
    fn metric(&mut self, _name: &str, _tensor: TensorRef) -> Result<()> {
        Ok(())
    }
    fn describe(&mut self, _tensor: TensorRef) -> Result<TensorDesc> {
        let segments = ["q", "k", "v"].map(|n| SegmentDesc { name: n.into(), axis: None, units: 4, unit: 1 });
        let dim = DimDesc { name: "qkv".into(), size: 12, local_size: 12, segments: segments.into() };
        Ok(TensorDesc { dtype: DType::Real, dims: vec![dim], partial: false })
    }
    fn unflatten(&mut self, tensor: TensorRef, names: &[&str]) -> Result<TensorRef> {
        self.calls.push(format!("unflatten {names:?}"));
        Ok(tensor)
    }
    fn log(&mut self, level: LogLevel, target: &str, message: &str) {
        self.calls.push(format!("{level:?} {target}: {message}"));
    }
}

#[test]
fn a_forward_reaches_the_host_as_written() {
    let mut host = Recorder::default();
    with_cx(&mut host, |cx| {
        let x = cx.batch("tokens")?;
        let x = cx.layer("layers.0", 0, x, |cx, x| {
            let h = cx.rms_norm("norm", cx.role(Role::MixerInput, x)?, ParamId(7), 1e-6)?;
            let [q, _, v] = cx.split("parts", h)?;
            cx.add("residual", x, cx.linear("proj", cx.mul("qv", q, v)?, ParamId(8))?)
        })?;
        cx.info(format_args!("{} layers", 1));
        cx.output_language_model("logits", cx.unflatten(x, &["a", "b"])?, ParamId(9))
    })
    .unwrap();
    let expect = [
        "begin layers.0 Layer Some(0)",
        "role MixerInput",
        "norm#3 [1, 1007]",
        "eps 0.000001",
        "parts#19 [2]",
        "qv#17 [3, 5]",
        "proj#2 [6, 1008]",
        "residual#16 [1, 7]",
        "end",
        "Info host: 1 layers",
        "unflatten [\"a\", \"b\"]",
        "output logits 2",
    ];
    assert_eq!(host.calls, expect);
}

#[test]
fn a_skipped_layer_passes_its_input_on() {
    let mut host = Recorder { skip_layer: Some(3), ..Recorder::default() };
    with_cx(&mut host, |cx| {
        let x = cx.batch("tokens")?;
        let y = cx.layer("layers.3", 3, x, |_, _| Err(Error::plugin("must not run")))?;
        assert_eq!(x, y);
        Ok(())
    })
    .unwrap();
    assert_eq!(host.calls, ["begin layers.3 Layer Some(3)"]);
}

#[test]
fn regions_are_closed_when_the_body_fails_and_the_first_error_wins() {
    let mut host = Recorder::default();
    let e = with_cx(&mut host, |cx| cx.recompute("r", |cx| cx.batch("labels"))).unwrap_err();
    assert_eq!((e.kind, e.message.as_str()), (ErrorKind::Shape, "no port \"labels\""));
    assert_eq!(host.calls, ["begin r Recompute None", "end"]);
}

#[test]
fn a_wrong_number_of_parts_lists_the_segments() {
    let e = with_cx(&mut Recorder::default(), |cx| cx.split::<5>("mixer.split", cx.batch("tokens")?)).unwrap_err();
    assert_eq!(e.message, "mixer.split: split into 5 parts, but the last dimension has 3 (q, k, v)");
}

#[test]
fn a_host_panic_is_an_error_even_if_the_provider_swallows_it() {
    let e = with_cx(&mut Recorder::default(), |cx| {
        let x = cx.batch("tokens")?;
        let _ = cx.activation("explode", x, Act::Silu);
        cx.activation("fine", x, Act::Silu)?;
        Ok(())
    })
    .unwrap_err();
    assert_eq!(e.kind, ErrorKind::Panic);
    assert!(e.message.starts_with("panicked in the host: host bug"), "{e}");
}

#[test]
fn a_kept_cx_is_refused() {
    let mut kept: Option<Cx> = None;
    let mut host = Recorder::default();
    with_cx(&mut host, |cx| {
        kept = Some(*cx);
        Ok(())
    })
    .unwrap();
    let kept = kept.unwrap();
    assert!(kept.batch("tokens").unwrap_err().message.contains("outside of forward"));
    let e = with_cx(&mut host, |_| kept.batch("tokens")).unwrap_err();
    assert!(e.message.contains("a Cx of an earlier call"), "{e}");
}

#[test]
fn another_thread_is_refused() {
    struct Smuggled(Cx);
    // SAFETY: none; a provider that does this must get an error, which is what is tested.
    #[allow(unsafe_code)]
    unsafe impl Sync for Smuggled {}
    let e = with_cx(&mut Recorder::default(), |cx| {
        let smuggled = Smuggled(*cx);
        let smuggled = &smuggled;
        std::thread::scope(|s| {
            s.spawn(move || {
                let s = smuggled;
                s.0.batch("tokens")
            })
            .join()
            .unwrap()
        })
    })
    .unwrap_err();
    assert!(e.message.contains("from another thread"), "{e}");
}

#[test]
fn recording_without_end_is_stopped() {
    let mut host = Recorder::default();
    let e = with_cx(&mut host, |cx| {
        let mut x = cx.batch("tokens")?;
        for _ in 0..10_000_000 {
            x = cx.scale("again", x, 2.0)?;
        }
        Ok(x)
    })
    .unwrap_err();
    assert!(e.message.contains("\"again\": does forward loop without end?"), "{e}");
}
