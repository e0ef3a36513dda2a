# Builds the source archive that packaging/build.sh makes, or an unpacked one. `nix build` needs no network
# for kvtier itself: all crates lie in the archive.
#
#   nix build path:packaging/nix --override-input source file://$PWD/OUT/kvtier-0.1.0-vendored.tar.gz
{
  description = "Tiered KV-cache storage, weight streaming and eviction policies for LLM inference engines";

  inputs.nixpkgs.url = "nixpkgs/nixos-unstable";
  # Must be overridden: a folder with the vendored sources.
  inputs.source = {
    url = "path:./source";
    flake = false;
  };

  outputs = { self, nixpkgs, source }:
    let
      systems = [ "x86_64-linux" "aarch64-linux" ];
      each = make: nixpkgs.lib.genAttrs systems (system: make nixpkgs.legacyPackages.${system});
    in
    {
      packages = each (pkgs: {
        default = pkgs.stdenv.mkDerivation {
          pname = "kvtier";
          version = "0.1.0";
          src = source;
          nativeBuildInputs = [ pkgs.cargo pkgs.rustc ];
          buildPhase = ''
            export HOME=$TMPDIR CARGO_TARGET_DIR=$TMPDIR/target
            KVTIER_TOOL=1 sh cmake/build.sh $TMPDIR/built dist
          '';
          installPhase = ''
            sh cmake/install.sh --prefix $out --from $TMPDIR/built
          '';
          # Installed by hand: CMake is not needed.
          dontConfigure = true;
          meta = {
            description = "Tiered KV-cache storage for LLM inference engines";
            license = pkgs.lib.licenses.asl20;
            platforms = systems;
            mainProgram = "kvtier";
          };
        };
      });
    };
}
