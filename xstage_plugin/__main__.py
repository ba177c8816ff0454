from xstage_plugin.cli import main

if __name__ == "__main__":
    main()
