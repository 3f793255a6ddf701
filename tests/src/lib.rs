pub mod goldens;
pub mod layouts;
pub mod plugins;
pub mod test_host;
